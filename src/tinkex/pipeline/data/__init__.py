"""Rows of text become batches of tokens."""
