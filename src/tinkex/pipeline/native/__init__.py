"""Kernels for training, compiled by this machine: what torch does in many passes over memory."""
