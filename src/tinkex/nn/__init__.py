"""Tensor computations: many LoRA adapters on one frozen model, packed sequences, KV cache."""
