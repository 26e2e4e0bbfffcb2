"""Measurements, each as a ratio within one run against a peer or a physical limit. `make bench` runs them all."""
