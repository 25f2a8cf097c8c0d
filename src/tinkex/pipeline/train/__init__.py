"""The training loop of the pipeline: updates, evaluation and metrics."""
