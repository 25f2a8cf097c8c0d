"""`tinkex session`: a module for each of its commands."""
