"""`python -m tinkex` is the `tinkex` command."""

from __future__ import annotations

from tinkex.cli.main import main

if __name__ == "__main__":
    main(prog_name="tinkex")
