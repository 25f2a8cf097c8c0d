"""The job queue and the worker: the only package that uses both the store and the engine."""
