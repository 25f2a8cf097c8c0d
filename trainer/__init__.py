"""Entry points of the pipeline's stages; all they do is in tinkex.pipeline."""
