"""Run the `tinkex` command with `python -m tinkex`."""

from __future__ import annotations

from tinkex.cli.main import main

if __name__ == "__main__":
    main(prog_name="tinkex")
