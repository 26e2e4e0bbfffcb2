"""Tools to test with: fake clock, in-process cluster, leak checks."""
