"""Tensor operations, one module each: a torch version and, where it pays, a C kernel."""
