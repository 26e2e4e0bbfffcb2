"""Moonpool behind the interfaces of other projects."""
