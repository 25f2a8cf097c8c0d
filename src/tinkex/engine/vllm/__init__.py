"""Sampling with vLLM, which runs in a process and a Python environment of its own."""
