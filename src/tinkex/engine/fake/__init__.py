"""A fake engine with a bigram model: exact gradients, fast and bit-reproducible."""
