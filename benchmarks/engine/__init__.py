"""Benchmarks of the engine against PEFT + transformers with equal model, data and threads."""
