"""Rows of JSONL files: reading them, and the layouts that data sets use."""
