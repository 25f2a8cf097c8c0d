"""Run scripts written for the official package unchanged: `import tinker` imports tinkex.

    python -m tinkex.as_tinker script.py [arguments]
    python -m tinkex.as_tinker -m module [arguments]

or, before anything imports `tinker`, `tinkex.install_as_tinker()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

OFFICIAL_PACKAGE, THIS_PACKAGE = "tinker", "tinkex"
USAGE = "usage: python -m tinkex.as_tinker (SCRIPT | -m MODULE) [ARGUMENTS ...]"


def install_as_tinker() -> None:
    """Make every later `import tinker` in this process import tinkex; idempotent.

    Raises ImportError if the official package is already imported.
    """
    if any(isinstance(finder, _TinkerFinder) for finder in sys.meta_path):
        return
    if OFFICIAL_PACKAGE in sys.modules:
        raise ImportError(
            "the official package `tinker` is already imported; call install_as_tinker() first",
            name=OFFICIAL_PACKAGE,
        )
    sys.meta_path.insert(0, _TinkerFinder())


class _TinkerFinder:
    """Resolves `tinker` and `tinker.*` to the modules of this package with the same paths."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the official package."""
        root, _, below = fullname.partition(".")
        if root != OFFICIAL_PACKAGE:
            return None
        module_name = f"{THIS_PACKAGE}.{below}" if below else THIS_PACKAGE
        try:
            spec = importlib.util.find_spec(module_name)
        except ModuleNotFoundError:
            return None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(module_name), is_package=is_package)

    def find_distributions(self, context: object = None) -> Iterator[Distribution]:
        """Yield metadata of `tinker`, whose version scripts look up."""
        if getattr(context, "name", None) == OFFICIAL_PACKAGE:
            yield _TinkerMetadata()


class _AliasLoader(Loader):
    """Creates a module that forwards every attribute lookup to a module of this package."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    def exec_module(self, module: ModuleType) -> None:
        """Install the forwarding lookup."""
        target = importlib.import_module(self._module_name)
        vars(module).update(
            __getattr__=lambda name: getattr(target, name),
            __dir__=lambda: dir(target),
            __doc__=target.__doc__,
        )
        if hasattr(target, "__all__"):
            vars(module)["__all__"] = target.__all__
        if self._module_name == THIS_PACKAGE:
            vars(module)["__version__"] = _official_version()


class _TinkerMetadata(Distribution):
    """Distribution metadata of `tinker` for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        """Return METADATA, the only file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {OFFICIAL_PACKAGE}\nVersion: {_official_version()}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return the path of a file of this package."""
        return Path(__file__).parent / path


def _official_version() -> str:
    """Return the version of the official package that this one implements."""
    version: str = importlib.import_module("tinkex.client.transport").WIRE_VERSION
    return version


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module with the same arguments and `__name__` as a direct call."""
    is_module = bool(arguments) and arguments[0] == "-m"
    rest = arguments[1:] if is_module else arguments
    if not rest or (not is_module and rest[0].startswith("-")):
        sys.exit(USAGE)
    if not is_module and not Path(rest[0]).exists():
        sys.exit(f"script not found: {rest[0]!r}\n{USAGE}")
    install_as_tinker()
    sys.argv = list(rest)
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    # Use the importable copy instead of __main__: the finder must be installed once.
    importlib.import_module("tinkex.as_tinker").main(sys.argv[1:])
