"""The composition root: the only place that knows which class does what."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from tinkex.errors import ConfigError, StoreUnavailable
from tinkex.home import Home
from tinkex.installation import install_command, missing_libraries
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.model_list import BaseModelList
from tinkex.server.periodic import PeriodicTask
from tinkex.settings import package_version
from tinkex.store import jobs
from tinkex.store.database import Database, redact_url
from tinkex.store.migrations import migrate

if TYPE_CHECKING:
    from tinkex.engine.protocol import Engine
    from tinkex.engine.torch_engine import TorchEngine
    from tinkex.jobs.worker import Worker, WorkerConfig
    from tinkex.server.http.request_context import Services

LOG = get_logger(__name__)
#: How often a process says that it is alive, or that it has work.
HEARTBEAT_SECONDS = 5.0


def open_database(config: ServerConfig) -> Database:
    """The store of a server; the caller closes it."""
    return Database(config.store_url)


@contextlib.contextmanager
def open_store(config: ServerConfig) -> Iterator[Database]:
    """The store of a server, made or brought up to date first, until the block ends."""
    Home(config.home).create()
    database = open_database(config)
    try:
        try:
            migrate(database)
        except StoreUnavailable as error:
            error.hint = (
                f"The store is {redact_url(config.store_url)}: see that it is there, that it "
                "may be "
                "written, and that tinkex made it; or restore it from a backup."
            )
            raise
        yield database
    finally:
        database.close()


@contextlib.contextmanager
def open_services(config: ServerConfig) -> Iterator[Services]:
    """What an API process works with, until the block ends."""
    from tinkex.jobs.future_waiters import FutureWaiters
    from tinkex.jobs.queue import JobQueue
    from tinkex.jobs.quotas import QuotaChecks
    from tinkex.jobs.wakeup import WakeupListener
    from tinkex.server.http.request_context import Services
    from tinkex.store.settings import get_or_create_secret

    with contextlib.ExitStack() as stack:
        database = open_database(config)
        stack.callback(database.close)
        signing = database.write(get_or_create_secret)
        bell = WakeupListener(database, "api")
        stack.callback(bell.close)
        stack.enter_context(PeriodicTask("bell", bell.heartbeat, HEARTBEAT_SECONDS))
        quotas = QuotaChecks(config.quotas)
        queue = JobQueue(database, config.queue_limits, signing, quotas)
        stack.callback(queue.close)
        yield Services(
            config=config,
            home=Home(config.home),
            database=database,
            queue=queue,
            quotas=quotas,
            waiters=FutureWaiters(queue, bell),
            secret=signing,
        )


def make_engine(config: ServerConfig) -> Engine:
    """The engine that the settings name."""
    if config.engine == "local":
        return _make_torch_engine(config, _model_list(config))
    from tinkex.engine.fake.engine import DEFAULT_MODELS, MAX_ADAPTER_BYTES, FakeEngine

    return FakeEngine(
        config.models or DEFAULT_MODELS,
        seconds_per_op=config.fake_seconds,
        step_tokens=config.engine_config.micro_batch_tokens,
        max_adapter_bytes=config.adapter_bytes or MAX_ADAPTER_BYTES,
    )


def _model_list(config: ServerConfig) -> BaseModelList:
    return BaseModelList(Home(config.home).models_file, config.models)


def compute_models_digest(config: ServerConfig) -> str:
    """What changes with the base models that the settings name, without loading any."""
    models: object = config.models
    if config.engine == "local":
        try:
            models = _model_list(config).read_sources()
        except ConfigError as error:
            # Only the worker can report it.
            models = error.message
    named = msgspec.json.encode([package_version(), config.engine, models])
    return hashlib.sha256(named).hexdigest()


def _make_torch_engine(config: ServerConfig, model_list: BaseModelList) -> TorchEngine:
    sources = model_list.read_sources()
    # It takes some seconds, and nothing else would be said meanwhile.
    LOG.info("loading PyTorch and checking the base models: %s", ", ".join(sources) or "none")
    try:
        from tinkex.engine.torch_engine import TorchEngine
    except ModuleNotFoundError as error:
        if (error.name or "tinkex").partition(".")[0] == "tinkex":
            raise
        missing = missing_libraries("torch") or [str(error.name)]
        raise ConfigError(
            f"the engine 'local' needs {', '.join(missing)}, not installed here; "
            f"run {install_command('server', 'torch')}, or use the engine 'fake'"
        ) from error
    if not sources:
        LOG.warning(
            "no base model is served, not even the one of the package: add one with "
            "`tinkex model add smollm2-135m`, or serve with --model NAME=PATH"
        )
    _register_tokenizers(config)
    return TorchEngine(sources, config.engine_config)


def _register_tokenizers(config: ServerConfig) -> None:
    """Put tokenizers where the official SDK looks for them, or remove them.

    These are the models that no `tinkex model add` has registered: the built-in ones and those of
    `models`. Failing is not a reason to stop: our own SDK fetches tokenizers from the server.
    """
    from tinkex.engine.models.hub_tokenizers import register_tokenizer, unregister_tokenizer
    from tinkex.engine.models.sources import is_folder_location, merge_sources
    from tinkex.models import built_in
    from tinkex.settings import expand_path

    for name, place in merge_sources(built_in(), config.models).items():
        if not config.register_tokenizers:
            unregister_tokenizer(name)
        elif is_folder_location(place):
            LOG.debug("tokenizer of %s: %s", name, register_tokenizer(name, expand_path(place)))


def _make_engine_with_refresh(config: ServerConfig) -> tuple[Engine, Callable[[], bool]]:
    """The engine, and what makes it follow the home's list of base models."""
    if config.engine != "local":
        return make_engine(config), lambda: False
    model_list = _model_list(config)
    engine = _make_torch_engine(config, model_list)
    return engine, lambda: model_list.refresh_if_changed(engine.replace_models)


@contextlib.contextmanager
def open_worker(config: ServerConfig) -> Iterator[Worker]:
    """A worker with its engine and store, until the block ends."""
    from tinkex.jobs.worker import Worker

    home = Home(config.home)
    with contextlib.ExitStack() as stack:
        database = open_database(config)
        stack.callback(database.close)
        # Before the list is read: a change in between is found by the next start.
        models_source = compute_models_digest(config)
        engine, refresh_models = _make_engine_with_refresh(config)
        stack.callback(engine.close)
        if config.idle_stop_seconds > 0:
            stack.enter_context(
                PeriodicTask("activity", lambda: _touch_if_busy(database, home), HEARTBEAT_SECONDS)
            )
        worker = Worker(
            database=database,
            engine=engine,
            home=home,
            config=worker_config(config),
            refresh_models=refresh_models,
            models_source=models_source,
        )
        # Not among the worker's own chores: it is as alive in the middle of a long turn.
        stack.enter_context(PeriodicTask("bell", worker.heartbeat, HEARTBEAT_SECONDS))
        yield worker


def worker_config(config: ServerConfig) -> WorkerConfig:
    """The settings that concern a worker."""
    from tinkex.jobs.housekeeping import HousekeepingPolicy
    from tinkex.jobs.quotas import QuotaChecks
    from tinkex.jobs.snapshots import SnapshotPolicy
    from tinkex.jobs.worker import WorkerConfig
    from tinkex.store.retention import RetentionPolicy

    return WorkerConfig(
        batch_limits=config.batch_limits,
        snapshots=SnapshotPolicy(
            max_changes=config.snapshot_changes, max_seconds=config.snapshot_seconds
        ),
        housekeeping=HousekeepingPolicy(
            session_seconds=config.session_seconds,
            retention=RetentionPolicy(
                steps_seconds=config.metrics_seconds, steps_per_session=config.metrics_per_session
            ),
        ),
        max_attempts=config.max_attempts,
        quotas=QuotaChecks(config.quotas),
        max_unnamed_weights=config.keep_sampler_weights,
        # The home's lock sees to it that an owner has one worker at a time.
        owner=f"{socket.gethostname()}:{config.home}",
    )


def _touch_if_busy(database: Database, home: Home) -> None:
    """A server with work is not idle, even if nobody asks for the results yet."""
    if database.read(jobs.get_load).num_jobs:
        home.activity_file.touch()
