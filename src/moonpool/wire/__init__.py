"""How processes talk: addresses, typed messages, framing, RPC."""
