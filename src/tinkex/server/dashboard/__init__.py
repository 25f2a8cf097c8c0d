"""The web dashboard: read-only pages with runs, queue, checkpoints and sessions."""
