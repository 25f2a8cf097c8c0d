"""How tinkex/tiny is made: its text, its recipe, its card. `python -m tinkex.pipeline.tiny`."""
