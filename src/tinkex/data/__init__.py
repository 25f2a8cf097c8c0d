"""Training data: JSONL files, row layouts and chat rendering."""
