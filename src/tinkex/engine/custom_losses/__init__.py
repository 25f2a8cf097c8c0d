"""Losses that clients upload as graphs: data that is interpreted, never code that is run."""
