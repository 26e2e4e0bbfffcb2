"""Moonpool: one pool of KV caches, shared by engines, machines and models."""

__version__ = "0.1.0"
