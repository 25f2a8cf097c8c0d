"""What all rings share."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.postgres import PostgresServer
from tinkex.logs import ROOT, attach_once

# A shell that starts this in the background has it ignore Ctrl-C, and so would every program under
# test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same with a terminal that goes away, if nohup started this.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Whoever runs the tests may say how wide his terminal is; tables must not be as wide as that.
os.environ.pop("COLUMNS", None)

# Servers and `model add` put tokenizers into the cache of Hugging Face: not into the user's.
HUB = tempfile.TemporaryDirectory(prefix="tinkex-tests-hub-")
os.environ["HF_HOME"] = HUB.name
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    os.environ.pop(_name, None)

# Most tests set HOME to a new directory; without this, every process would compile the C kernels.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# `ci` gives every run of a commit the same examples; `dev` and `nightly` search for new ones.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, print_blob=True, database=None
)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole run."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    """The package's log as one test found it, whatever it attached: the next may count records."""
    logger = logging.getLogger(ROOT)
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    attach_once.cache_clear()
