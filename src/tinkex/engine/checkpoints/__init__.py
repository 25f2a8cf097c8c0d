"""Adapters on disk: PEFT checkpoints, snapshots, merged models."""
