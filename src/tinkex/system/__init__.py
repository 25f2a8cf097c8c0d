"""Operating-system primitives: atomic directories, file locks, process checks, disk errors."""
