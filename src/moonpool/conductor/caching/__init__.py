"""Context caching: four public APIs over one object, the pin.

    pin  ←  pins, tags, fields  ←  backend  ←  moonshot, gemini, anthropic, openai  ←  proxy, routes

A *pin* says: the KV of this beginning of a prompt should stay with at least so many instances until then. `pins` is pure; `routes`
is what a server mounts, `proxy` what it asks on the way of a completion.
"""
