"""Endpoint handlers, one module per kind of resource."""
