"""What all rings share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.postgres import PostgresServer
from tests.support.s3_server import S3Bucket, S3Server
from tinkex.logs import ROOT, attach_once

# A shell that starts this in the background has it ignore Ctrl-C, and so would every program under
# test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same with a terminal that goes away, if nohup started this.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tables must not depend on the width of the terminal that runs the tests.
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


#: Packages whose tests share servers; one process runs all of them, so that they start once.
SHARED_SERVER_PACKAGES = (
    "tests/acceptance/cli/",
    "tests/acceptance/engine/",
    "tests/acceptance/server/",
)


class SharedServerScheduling(LoadFileScheduling):
    """Distributes tests to processes by file, and by package if the package shares servers."""

    def _split_scope(self, nodeid: str) -> str:
        packages = (package for package in SHARED_SERVER_PACKAGES if nodeid.startswith(package))
        return next(packages, nodeid.partition("::")[0])


def pytest_configure() -> None:
    """Collect no garbage while test modules are imported: almost nothing of it is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection, which is slow with a million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedServerScheduling:
    """Replace the scheduler of `--dist loadfile`."""
    return SharedServerScheduling(config, log)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole run."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_s3() -> Iterator[S3Server]:
    """An S3 server for the whole run."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bucket]:
    """A bucket of its own, behind a door that the test can close."""
    with S3Bucket(shared_s3) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        yield bucket


@pytest.fixture(params=["file", "s3"])
def blobs_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty object store, of each kind."""
    if request.param == "file":
        return f"file://{tmp_path}/objects"
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.url


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    """The package's log as one test found it, whatever it attached: the next may count records."""
    logger = logging.getLogger(ROOT)
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    attach_once.cache_clear()
