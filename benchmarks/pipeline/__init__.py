"""The pipeline's trainers against transformers' Trainer, on the same model and data."""
