"""Base models: where they are, what they are, and those that are in memory."""
