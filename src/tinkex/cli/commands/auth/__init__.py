"""`tinkex auth`: a module for each of its commands."""
