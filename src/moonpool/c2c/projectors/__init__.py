"""Projector kinds behind one interface."""
