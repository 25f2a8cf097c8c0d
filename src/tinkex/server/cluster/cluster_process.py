"""Cluster process: runs the controller; the supervisor of `tinkex serve` starts it.

It ends when Ray is lost, and is started again until Ray is back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from tinkex.errors import ConfigError, StoreError, TinkexError
from tinkex.installation import install_command
from tinkex.jobs.lease import CONTROLLER_LEASE, CoordinatorLease
from tinkex.logs import get_logger
from tinkex.server.cluster.controller import ClusterController
from tinkex.server.config import ServerConfig
from tinkex.server.process.child_setup import initialize_child
from tinkex.server.process.restart_policy import exit_code_for
from tinkex.server.wiring import open_database
from tinkex.store.settings import get_or_create_store_id

LOG = get_logger(__name__)
#: Interval of the comparison of the store with the cluster.
POLL_SECONDS = 1.0
#: A call of Ray that is interrupted by the loss of the head may block forever, and so may the
#: connection to a head that is starting. After this time the process writes where it is blocked,
#: and ends.
MAX_BLOCKED_SECONDS = 60.0


def main() -> int:
    """Run until SIGTERM; return the exit code. The groups stay on the cluster."""
    setup = initialize_child()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        run_controller(setup.config, stop)
    except TinkexError as error:
        LOG.error("%s%s", error.message, f". {error.hint}" if error.hint else "")
        return exit_code_for(error)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises, a new process connects anew
        LOG.error("the Ray cluster is lost: %s", " ".join(str(error).split())[:500])
        return 1
    return 0


def run_controller(config: ServerConfig, stop: threading.Event) -> None:
    """Connect to Ray and control the groups of the store until `stop` is set."""
    try:
        # Late, so that a missing package is one sentence.
        from tinkex.server.cluster.actors import RayCluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            f"cluster = 'ray' needs Ray, which is not installed; run {install_command('ray')}"
        ) from error
    with contextlib.ExitStack() as stack:
        database = open_database(config)
        stack.callback(database.close)
        store_id = database.write(get_or_create_store_id)
        lease = CoordinatorLease(
            database, f"{socket.gethostname()}:{config.home}", name=CONTROLLER_LEASE
        )
        with _limit_blocked_time():
            cluster = RayCluster(config.ray_address, store_id)
        stack.callback(cluster.close)
        controller = ClusterController(config, database, cluster)
        stack.callback(controller.close)
        while not stop.wait(POLL_SECONDS):
            _run_once(controller, lease)


def _run_once(controller: ClusterController, lease: CoordinatorLease) -> None:
    try:
        with _limit_blocked_time():
            if lease.hold():
                controller.run_once()
    except StoreError as error:
        LOG.warning("the store is not available, will retry: %s", error)


@contextlib.contextmanager
def _limit_blocked_time() -> Iterator[None]:
    """End the process with the stacks of its threads if the block takes too long."""
    faulthandler.dump_traceback_later(MAX_BLOCKED_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
