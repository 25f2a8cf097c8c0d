"""Run scripts written for the official package unchanged: `import tinker` then means tinkex.

    python -m tinkex.as_tinker script.py [arguments]
    python -m tinkex.as_tinker -m module [arguments]

or, before anything imports `tinker`, `tinkex.install_as_tinker()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

OFFICIAL_PACKAGE, THIS_PACKAGE = "tinker", "tinkex"
USAGE = "usage: python -m tinkex.as_tinker (SCRIPT | -m MODULE) [ARGUMENTS ...]"


def install_as_tinker() -> None:
    """Answer every later `import tinker` in this process with tinkex; safe to call again.

    Raises ImportError if the official package is imported already.
    """
    if any(isinstance(finder, _TinkerFinder) for finder in sys.meta_path):
        return
    if OFFICIAL_PACKAGE in sys.modules:
        raise ImportError(
            "the official package `tinker` is imported already; call install_as_tinker() first",
            name=OFFICIAL_PACKAGE,
        )
    sys.meta_path.insert(0, _TinkerFinder())


class _TinkerFinder:
    """Finds `tinker` and `tinker.*`: the modules of this package with the same paths."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """How to import a module of the official package."""
        root, _, below = fullname.partition(".")
        if root != OFFICIAL_PACKAGE:
            return None
        ours = f"{THIS_PACKAGE}.{below}" if below else THIS_PACKAGE
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(ours), is_package=is_package)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The metadata of `tinker`: scripts look up its version."""
        if getattr(context, "name", None) == OFFICIAL_PACKAGE:
            yield _TinkerMetadata()


class _AliasLoader(Loader):
    """Makes a module that passes every lookup on to ours."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names of ours."""
        ours = importlib.import_module(self._module_name)
        vars(module).update(
            __getattr__=lambda name: getattr(ours, name),
            __dir__=lambda: dir(ours),
            __doc__=ours.__doc__,
        )
        if hasattr(ours, "__all__"):
            vars(module)["__all__"] = ours.__all__
        if self._module_name == THIS_PACKAGE:
            vars(module)["__version__"] = _official_version()


class _TinkerMetadata(Distribution):
    """What `importlib.metadata` says of `tinker`."""

    def read_text(self, filename: str) -> str | None:
        """The one file there is."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {OFFICIAL_PACKAGE}\nVersion: {_official_version()}\n"

    def locate_file(self, path: Any) -> Any:
        """Where a file of this package is."""
        return Path(__file__).parent / path


def _official_version() -> str:
    """The version of the official package that this one stands for."""
    version: str = importlib.import_module("tinkex.client.transport").WIRE_VERSION
    return version


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module; its arguments and `__name__` are those of a direct call."""
    is_module = bool(arguments) and arguments[0] == "-m"
    rest = arguments[1:] if is_module else arguments
    if not rest or (not is_module and rest[0].startswith("-")):
        sys.exit(USAGE)
    if not is_module and not Path(rest[0]).exists():
        sys.exit(f"there is no script {rest[0]!r}\n{USAGE}")
    install_as_tinker()
    sys.argv = list(rest)
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    # Not this copy, which is called __main__: the finder must be installed once.
    importlib.import_module("tinkex.as_tinker").main(sys.argv[1:])
