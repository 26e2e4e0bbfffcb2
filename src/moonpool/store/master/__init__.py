"""The index of the pool: who is alive, who holds what. It may be lost."""
