"""The conductor measured: its decisions at size, and its proxy beside released routers."""
