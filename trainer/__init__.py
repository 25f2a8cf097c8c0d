"""Entry points of the trainers; the implementation is in tinkex.pipeline."""
