"""Train a language model from scratch, with checkpoints that resume bit-identically."""
