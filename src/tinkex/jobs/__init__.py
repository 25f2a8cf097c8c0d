"""Promises and who keeps them: the only room where the store and the engine meet."""
