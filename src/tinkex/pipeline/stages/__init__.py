"""The four stages: what each learns from, its loss, and how it is judged."""
