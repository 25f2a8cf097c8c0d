"""`tinkex checkpoint`: a module for each of its commands."""
