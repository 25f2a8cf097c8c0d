"""Data, training recipe and model card of tinkex/tiny: `python -m tinkex.pipeline.tiny`."""
