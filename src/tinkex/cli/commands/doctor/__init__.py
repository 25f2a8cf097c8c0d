"""`tinkex doctor`: checks of an installation, each on its own."""
