"""The peer's console scripts, on Moonpool's processes."""
