"""The `tinkex` command-line interface."""
