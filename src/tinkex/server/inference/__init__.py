"""Inference endpoints for clients of the OpenAI and Anthropic APIs."""
