"""Registered memory and the transports that move bytes."""
