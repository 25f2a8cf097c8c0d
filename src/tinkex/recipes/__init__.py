"""Fine-tuning recipes on JSONL files through the public API: sft, dpo and rl."""
