"""Makes projectors: KV captures, documents, moments and ridge, distillation, the baseline."""
