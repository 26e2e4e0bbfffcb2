"""KV events of engines: decoded (`codec`), put in order (`source`), turned into our own keys (`translate`), received (`ingest`)."""
