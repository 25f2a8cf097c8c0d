"""Fine-tunes from a JSONL file through the public API: sft, dpo and rl."""
