"""Engines hold model weights: the protocol, the PyTorch engine and a fake for tests."""
