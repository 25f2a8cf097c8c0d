"""Other inference engines, each run by the Python of an environment of its own."""
