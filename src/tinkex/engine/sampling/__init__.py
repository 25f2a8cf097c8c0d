"""Samples of one base model: all that run, of all adapters and tenants, take each step together."""
