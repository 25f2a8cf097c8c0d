"""`tinkex usage` and `tinkex billing`: what was used, a module for each view."""
