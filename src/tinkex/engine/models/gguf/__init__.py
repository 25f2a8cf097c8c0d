"""GGUF files: read, and turned into model folders of Hugging Face's layout, exactly and once."""
