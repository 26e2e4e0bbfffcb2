"""Static descriptors by key, over the HTTP metadata protocol that Mooncake's TransferEngine speaks."""
