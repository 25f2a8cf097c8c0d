"""Fine-tunes from a JSONL file."""
