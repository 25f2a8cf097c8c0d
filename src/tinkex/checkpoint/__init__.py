"""How a directory comes to exist on disk: whole or not at all, with a manifest of what is in it."""
