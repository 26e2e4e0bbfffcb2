"""The built-in engine: Hugging Face Transformers behind an OpenAI-compatible server."""
