"""Checkpoint directories: manifest, verification, archive, encryption and retention."""
