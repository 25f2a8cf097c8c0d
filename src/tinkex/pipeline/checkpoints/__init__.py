"""Step checkpoints: layout, saving and resuming."""
