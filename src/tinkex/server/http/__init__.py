"""The HTTP API: routing, authentication, validation and responses."""
