"""Inference endpoints."""
