"""Clients of the OpenAI and Anthropic APIs, unmodified, against a real server."""
