"""A base model from nothing: stages of training with step checkpoints that resume bit for bit."""
