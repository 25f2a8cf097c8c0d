"""Tests of the fake engine with real tokenizers."""
