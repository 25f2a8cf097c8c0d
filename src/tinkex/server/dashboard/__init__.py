"""Pages for people: what is being trained, how far it has come, and what waits."""
