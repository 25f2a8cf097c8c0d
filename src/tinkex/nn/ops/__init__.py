"""Matrix products of our own for float32 on a CPU, compiled where they run."""
