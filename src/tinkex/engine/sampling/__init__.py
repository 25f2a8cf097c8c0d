"""Sampling with continuous batching: sequences of all adapters and tenants share each step."""
