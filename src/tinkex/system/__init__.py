"""Operating-system primitives: atomic directories, free disk space."""
