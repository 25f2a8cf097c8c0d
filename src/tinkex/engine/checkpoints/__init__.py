"""Adapters on disk: PEFT checkpoints, snapshots and merged models."""
