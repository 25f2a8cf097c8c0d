"""Entry point of child processes: imports the module on the command line and runs its `main`."""

from __future__ import annotations

import importlib
import sys

from tinkex.system.processes import no_garbage_collection


def main() -> int:
    """Run the module; return the exit code."""
    del sys.argv[0]
    with no_garbage_collection():
        module = importlib.import_module(sys.argv[0])
    exit_code: int = module.main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
