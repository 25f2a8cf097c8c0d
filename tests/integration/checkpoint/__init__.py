"""Tests of checkpoints with real object stores."""
