"""Processes that start in milliseconds: forks of one that has imported the modules."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_preloaded: tuple[str, ...] = ()


def forks_of(*modules: str) -> ForkServerContext:
    """Return a context whose processes have these modules loaded.

    A test run has one fork server. If another file made it load other modules, it is stopped here:
    otherwise every process would import these for itself, which takes seconds.
    """
    global _preloaded
    context = multiprocessing.get_context("forkserver")
    if modules != _preloaded:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        context.set_forkserver_preload([*modules])
        _preloaded = modules
    return context
