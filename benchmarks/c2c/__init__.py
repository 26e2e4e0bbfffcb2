"""Conversion measured: against the machine's limits (`speed`), and against the native cache and other maps (`quality`)."""
