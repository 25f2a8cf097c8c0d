"""Scenarios that run inside the environment of one SDK; they import nothing but that SDK."""
