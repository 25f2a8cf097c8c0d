"""Composition root: build the store, the services of an API process, the engine and the worker."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import msgspec

from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.models.sources import BaseModelList
from tinkex.errors import ConfigError, StoreUnavailable
from tinkex.home import Home
from tinkex.installation import install_command, missing_libraries
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.periodic import PeriodicTask
from tinkex.settings import package_version
from tinkex.store import jobs
from tinkex.store.coordination import adopt_store_clock
from tinkex.store.database import Database, redact_url
from tinkex.store.migrations import migrate
from tinkex.system.addresses import find_own_address

if TYPE_CHECKING:
    from tinkex.engine.protocol import BaseModel, Engine
    from tinkex.engine.torch_engine import TorchEngine
    from tinkex.engine.vllm.bridge import VllmEngine
    from tinkex.jobs.worker import Worker
    from tinkex.jobs.worker_config import WorkerConfig
    from tinkex.server.http.request_context import Services
    from tinkex.text import Tokenizer

LOG = get_logger(__name__)
#: Interval of heartbeats and of the check for unfinished jobs.
HEARTBEAT_SECONDS = 5.0
LOOPBACK = "127.0.0.1"


def open_database(config: ServerConfig) -> Database:
    """Open the store of a server; the caller closes it."""
    return Database(config.store_url, max_connections=config.store_connections)


def open_blobs(config: ServerConfig) -> BlobCache | None:
    """Open the object store of a server; None if its files are in the home."""
    if not config.blobs:
        return None
    try:
        from tinkex.checkpoint.blobs import BlobStore
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(
            f"blobs is {config.blobs!r}, which needs the package obstore; run "
            f"{install_command('blobs')}"
        ) from error
    home = Home(config.home)
    return BlobCache(BlobStore(config.blobs), home.blob_cache, config.blob_cache_bytes)


@contextlib.contextmanager
def open_store(config: ServerConfig) -> Iterator[Database]:
    """Open the store of a server and migrate it to the current schema."""
    Home(config.home).create()
    database = open_database(config)
    try:
        try:
            migrate(database)
            adopt_store_clock(database)
        except StoreUnavailable as error:
            error.hint = (
                f"The store is {redact_url(config.store_url)}: check that it exists, is writable "
                "and was created by tinkex; or restore it from a backup."
            )
            raise
        yield database
    finally:
        database.close()


@contextlib.contextmanager
def open_services(config: ServerConfig) -> Iterator[Services]:
    """Open the services of an API process."""
    from tinkex.jobs.future_waiters import FutureWaiters
    from tinkex.jobs.queue import JobQueue
    from tinkex.jobs.quotas import QuotaChecks
    from tinkex.jobs.token_streams import TokenStreams
    from tinkex.jobs.wakeup import WakeupListener
    from tinkex.server.http.prometheus import StreamMetrics
    from tinkex.server.http.request_context import Services
    from tinkex.store.settings import get_or_create_secret

    with contextlib.ExitStack() as stack:
        database = open_database(config)
        stack.callback(database.close)
        secret = database.write(get_or_create_secret)
        listener = WakeupListener(database, "api")
        stack.callback(listener.close)
        stack.enter_context(PeriodicTask("heartbeat", listener.heartbeat, HEARTBEAT_SECONDS))
        quotas = QuotaChecks(config.quotas)
        queue = JobQueue(
            database, config.queue_limits, secret, quotas, vllm_models=config.vllm_models
        )
        stack.callback(queue.close)
        waiters = FutureWaiters(queue, listener)
        storage = FileStorage(Home(config.home), open_blobs(config))
        yield Services(
            config=config,
            home=Home(config.home),
            storage=storage,
            database=database,
            queue=queue,
            quotas=quotas,
            waiters=waiters,
            token_streams=TokenStreams(database, queue, waiters, secret, observer=StreamMetrics()),
            process_id=listener.process.id,
            secret=secret,
            load_tokenizer=_tokenizer_loader(config, storage),
        )


def _tokenizer_loader(
    config: ServerConfig, storage: FileStorage
) -> Callable[[BaseModel], Tokenizer]:
    from tinkex.server.http.model_tokenizers import load_served_tokenizer

    load = partial(load_served_tokenizer, storage, Home(config.home))
    if config.engine != "fake":
        return load
    from tinkex.engine.fake.toy_tokenizer import toy_tokenizer

    toy = cast("Tokenizer", toy_tokenizer())
    return lambda base: load(base) if base.tokenizer_folder else toy


def make_engine(config: ServerConfig) -> Engine:
    """Create the configured engine."""
    if config.engine == "local":
        return _make_torch_engine(config, _model_list(config))
    if config.engine == "vllm":
        return _make_vllm_engine(config)
    from tinkex.engine.fake.engine import DEFAULT_MODELS, MAX_ADAPTER_BYTES, FakeEngine

    return FakeEngine(
        config.models or DEFAULT_MODELS,
        seconds_per_op=config.fake_seconds,
        seconds_per_token=config.fake_token_seconds,
        step_tokens=config.engine_config.micro_batch_tokens,
        max_adapter_bytes=config.adapter_bytes or MAX_ADAPTER_BYTES,
    )


def _model_list(config: ServerConfig) -> BaseModelList:
    return BaseModelList(Home(config.home).models_file, config.models)


def compute_models_digest(config: ServerConfig) -> str:
    """A digest that changes with the configured base models; loads none of them."""
    models: object = config.models
    if config.engine == "local":
        try:
            models = _model_list(config).read_sources()
        except ConfigError as error:
            # The worker reports the error when it starts.
            models = error.message
    content = msgspec.json.encode([package_version(), config.engine, models])
    return hashlib.sha256(content).hexdigest()


def _make_torch_engine(config: ServerConfig, model_list: BaseModelList) -> TorchEngine:
    sources = model_list.read_sources()
    # Loading takes some seconds without any other output.
    LOG.info("loading PyTorch and checking the base models: %s", ", ".join(sources) or "none")
    try:
        from tinkex.engine.torch_engine import TorchEngine
    except ModuleNotFoundError as error:
        if (error.name or "tinkex").partition(".")[0] == "tinkex":
            raise
        missing = missing_libraries("torch") or [str(error.name)]
        raise ConfigError(
            f"the engine 'local' needs {', '.join(missing)}, which is not installed; "
            f"run {install_command('server', 'torch')}, or use the engine 'fake'"
        ) from error
    if not sources:
        LOG.warning(
            "no base model is served, not even a built-in one: add one with "
            "`tinkex model add smollm2-135m`, or serve with --model NAME=PATH"
        )
    _register_tokenizers(config)
    followers = None
    if config.ranks > 1:
        from tinkex.engine.parallel.leader import open_followers

        followers = open_followers(sources, config.engine_config)
    return TorchEngine(sources, config.engine_config, followers)


def _make_vllm_engine(config: ServerConfig) -> VllmEngine:
    from tinkex.engine.models.hub_download import Hub
    from tinkex.engine.models.model_folder import read_model_folder
    from tinkex.engine.models.sources import is_folder_location
    from tinkex.engine.vllm.bridge import VllmConfig, VllmEngine
    from tinkex.settings import expand_path

    if not config.vllm_python:
        raise ConfigError(
            "the engine 'vllm' needs vllm_python, the Python of an environment that has vLLM; "
            "give --vllm-python PATH, after scripts/install-vllm.sh"
        )
    name, location = _find_only_model(config)
    is_folder = is_folder_location(location)
    folder = read_model_folder(expand_path(location)) if is_folder else Hub().find(location)
    return VllmEngine(
        VllmConfig(
            python=str(expand_path(config.vllm_python)),
            base_model=name,
            folder=folder,
            tokenizer_id=None if is_folder else location,
            dtype=config.dtype,
            max_samples=config.max_sequences,
            cache_bytes=config.cache_bytes,
            options=config.vllm_options,
        )
    )


def _find_only_model(config: ServerConfig) -> tuple[str, str]:
    """The name and location of the model that a worker with vLLM serves."""
    from tinkex.engine.models.sources import parse_source

    if len(config.models) != 1:
        raise ConfigError(
            f"a worker with vLLM serves one base model, but {len(config.models)} are given; "
            "give one --model"
        )
    (text,) = config.models
    name, location = parse_source(text)
    # A name alone is that of a model of the home, or of a built-in one.
    known = BaseModelList(Home(config.home).models_file, ()).read_sources()
    return name, location if "=" in text else known.get(text, location)


def _register_tokenizers(config: ServerConfig) -> None:
    """Copy tokenizers into the Hugging Face cache, where the official SDK looks, or remove them.

    Covers the models that `tinkex model add` has not registered: the built-in ones and those of
    `models`. Failures are not fatal: the tinkex SDK fetches tokenizers from the server.
    """
    from tinkex.engine.models.hub_tokenizers import register_tokenizer, unregister_tokenizer
    from tinkex.engine.models.sources import is_folder_location, merge_sources
    from tinkex.models import built_in
    from tinkex.settings import expand_path

    for name, location in merge_sources(built_in(), config.models).items():
        if not config.register_tokenizers:
            unregister_tokenizer(name)
        elif is_folder_location(location):
            LOG.debug("tokenizer of %s: %s", name, register_tokenizer(name, expand_path(location)))


def _make_engine_with_refresh(config: ServerConfig) -> tuple[Engine, Callable[[], bool]]:
    """Create the engine and a function that reloads the home's list of base models."""
    if config.engine == "vllm":
        vllm_engine = _make_vllm_engine(config)
        return vllm_engine, vllm_engine.check_alive
    if config.engine != "local":
        return make_engine(config), lambda: False
    model_list = _model_list(config)
    engine = _make_torch_engine(config, model_list)
    return engine, lambda: model_list.refresh_if_changed(engine.replace_models)


@contextlib.contextmanager
def open_worker(config: ServerConfig, group_id: str = "", owner: str = "") -> Iterator[Worker]:
    """Open the worker of a group with its engine and store."""
    from tinkex.jobs.worker import Worker

    home = Home(config.home)
    with contextlib.ExitStack() as stack:
        database = open_database(config)
        stack.callback(database.close)
        # Taken before the list is read, so the next start notices a change in between.
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
            config=worker_config(config, group_id, owner),
            blobs=open_blobs(config),
            refresh_models=refresh_models,
            models_source=models_source,
        )
        if config.ranks > 1:
            stack.enter_context(
                PeriodicTask("ranks", lambda: _check_ranks(engine, worker), HEARTBEAT_SECONDS)
            )
        # On a separate thread: the worker must send heartbeats also during a long batch.
        stack.enter_context(PeriodicTask("heartbeat", worker.heartbeat, HEARTBEAT_SECONDS))
        yield worker


def _check_ranks(engine: Engine, worker: Worker) -> None:
    """Stop the worker, which is then restarted, if one of its ranks has died."""
    from tinkex.engine.protocol import EngineLost
    from tinkex.engine.torch_engine import TorchEngine

    assert isinstance(engine, TorchEngine)
    try:
        engine.check_ranks()
    except EngineLost as error:
        LOG.error("%s", error.message)
        worker.stop()


def worker_config(config: ServerConfig, group_id: str = "", owner: str = "") -> WorkerConfig:
    """The settings of a worker."""
    from tinkex.jobs.housekeeping import HousekeepingPolicy
    from tinkex.jobs.quotas import QuotaChecks
    from tinkex.jobs.snapshots import SnapshotPolicy
    from tinkex.jobs.worker_config import WorkerConfig
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
        # The home's lock ensures that only one worker per owner runs at a time.
        owner=owner or f"{socket.gethostname()}:{config.home}",
        group_id=group_id,
        move_after_seconds=config.move_after_seconds,
        stream_host=find_stream_host(config),
    )


def find_stream_host(config: ServerConfig) -> str:
    """The address at which API processes read the tokens of running samples."""
    if config.stream_host != "auto":
        return config.stream_host or LOOPBACK
    store_host = urlsplit(config.store_url).hostname
    return find_own_address(store_host) if store_host else LOOPBACK


def _touch_if_busy(database: Database, home: Home) -> None:
    """Touch the activity file while jobs are unfinished: a server with work is not idle."""
    if database.read(jobs.get_load).num_jobs:
        home.activity_file.touch()
