"""What each endpoint does, one module per kind of thing."""
