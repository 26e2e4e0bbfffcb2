"""Owner and authority of the bytes that one node lends to the pool."""
