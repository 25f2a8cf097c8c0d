"""Server settings with their defaults and checks; `config_sources` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.engine.config import (
    DEFAULT_SHARDS,
    MAX_SHARDS,
    EngineConfig,
    is_power_of_two,
)
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.jobs.fair_queue import BatchLimits
from tinkex.jobs.queue import QueueLimits
from tinkex.logs import LEVELS
from tinkex.server.config_limits import check_numbers
from tinkex.server.pools import CLUSTERS, DEFAULT_POOL, PoolConfig, check_pools
from tinkex.store.quotas import Quotas
from tinkex.system.addresses import is_ip_address

ENGINES = ("local", "fake", "vllm")
SAMPLERS = ("trainer", "vllm")
TOOL_PARSERS = ("hermes", "qwen-xml", "llama3", "mistral", "plain")
MAX_WORKERS = 256
#: The tenant that owns the key created with a home.
DEFAULT_TENANT = "default"
_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of a server; each field is a TOML key and a TINKEX_ environment variable."""

    home: Path
    """The state directory of the server: database, checkpoints, key."""
    host: str = "127.0.0.1"
    """The address to listen on. Any address other than loopback requires an API key."""
    port: int = 8000
    """The port to listen on; 0 picks a free one."""
    store: str = ""
    """The database URL; empty means SQLite in the home."""
    store_connections: int = 8
    """Connections of each process to PostgreSQL. All API processes and workers of a store share the
    server's max_connections."""
    blobs: str = ""
    """Where checkpoints, snapshots and large requests are stored: s3://BUCKET/PREFIX,
    gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY; empty means the home."""
    blob_cache_bytes: int = 16 << 30
    """Disk space in the home for copies of files in `blobs`; the least recently used go first."""
    blob_links: bool = True
    """Let clients download files from the object store itself, by URLs that it signs. False sends
    them through the API, for clients that cannot reach the object store."""
    engine: str = "local"
    """The compute engine: local is PyTorch; vllm samples with vLLM and does not train; fake is
    arithmetic on a tiny model, for tests."""
    models: tuple[str, ...] = ()
    """Base models to serve in addition to the home's, as NAME=PATH or a Hugging Face Hub id."""
    model_folders: tuple[str, ...] = ()
    """Folders whose models the operator can add on the dashboard: each model folder and GGUF file
    directly in them."""
    register_tokenizers: bool = True
    """Copy the tokenizers of tinkex/tiny and of `models` into the Hugging Face cache, where the
    official SDK looks for them; false removes them. `tinkex model add` makes its own copies."""
    api_key: str = field(default="", repr=False)
    """An API key to add to the default tenant at startup."""
    api_processes: int = 1
    """Number of API processes that serve HTTP."""
    workers: int = 1
    """Number of worker processes, each with an engine; models and samples are divided among them.
    0 serves HTTP only, for workers that `tinkex worker` starts."""
    ranks: int = 1
    """Number of processes that compute each training pass of a worker together: 1, 2, 4 and so on.
    They share the cores; each has its own copy of the base models, or its own GPU."""
    gradient_shards: int = 0
    """Parts of a batch whose gradients are added in a fixed order, stored with each new model: it
    trains with the same bits on any number of ranks that divides it. 0: 1 for one rank, else 8."""
    shard_base: bool = False
    """Divide the layers of base models among the ranks, for models that do not fit one device; a
    pass then gathers each layer's weights before it runs, which is slow."""
    rendezvous: str = ""
    """HOST:PORT where the worker waits for its other ranks, which are started by hand or by a
    cluster, perhaps on other machines; empty starts them here. Use a trusted network only."""
    cluster: str = ""
    """Where workers run: empty for this machine, `ray` for a Ray cluster; needs PostgreSQL."""
    ray_address: str = "auto"
    """The Ray cluster: HOST:PORT of its head, ray://HOST:PORT of its client server, or auto for the
    cluster of which this machine is a node."""
    max_workers: int = 0
    """With `cluster`, start up to this many workers when work is queued; 0: `workers`."""
    pools: tuple[PoolConfig, ...] = ()
    """With `cluster`, pools of workers as tables with name, models, ranks, resources, min and max;
    empty is one pool of `workers`."""
    stream_host: str = ""
    """The IP address at which API processes on other machines read the tokens of a worker's running
    samples; auto: that with which it reaches PostgreSQL; empty: loopback, on a cluster the node's.
    Both sides authenticate themselves, but tokens are not encrypted: use a trusted network only."""
    move_after_seconds: float = 30.0
    """A worker that is gone for this time loses its models to the other workers, if there are."""
    log_level: str = "info"
    """The lowest level logged to stderr: debug, info, warning or error."""
    idle_stop_seconds: float = 0.0
    """Stop after this time without a request; 0 never stops."""
    worker_on_demand: bool = False
    """Start the worker, which loads PyTorch, with the first job instead of at startup. A server
    that a command starts only to read from it does so."""
    stop_seconds: float = 30.0
    """Grace period for processes at shutdown; then they are killed."""

    # --- engine --------------------------------------------------------------------------------
    device: str = "auto"
    """The device of base models: cpu, cuda, cuda:1; auto uses a GPU if there is one."""
    dtype: str = "float32"
    """The dtype of base models: float32, bfloat16 or float16; adapters are always float32."""
    threads: int = 0
    """Compute threads of the engine; 0 uses one per core."""
    deterministic: bool = False
    """Run each request in a separate pass, so that results are bit-identical in any batch."""
    pass_tokens: int = 4096
    """Maximum tokens of one forward and backward pass; larger requests run in several passes."""
    step_tokens: int = 1024
    """Maximum tokens of a training micro-batch; other work runs between micro-batches."""
    cache_bytes: int = 1 << 30
    """Memory for the KV cache of running samples, per base model."""
    packed_bytes: int = 1 << 30
    """Memory for repacked weight copies that speed up CPU passes, per base model."""
    max_sequences: int = 64
    """Maximum sequences sampled at once, per base model; an eighth more for idle tenants."""
    memory_bytes: int = 0
    """Memory for base models; the least recently used are evicted. 0 keeps all."""
    adapter_bytes: int = 0
    """Memory for models in training; the least recently used move to disk until they are used
    again. 0 uses a quarter of the memory of the machine or GPU."""
    sampler_bytes: int = 1 << 30
    """Memory for saved weights in use by samplers; the least recently used are evicted."""
    apply_nonfinite: bool = False
    """Apply optimizer steps whose gradient has NaN or infinity, instead of failing them."""
    samplers: Mapping[str, Any] = field(default_factory=dict)
    """What samples from each base model: trainer, the default, is the engine that trains; vllm
    prefers workers of the engine vllm."""
    vllm_python: str = ""
    """The Python of the environment that has vLLM, for the engine vllm."""
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, such as max_lora_rank or tensor_parallel_size."""

    # --- HTTP ----------------------------------------------------------------------------------
    max_body_bytes: int = 64 * 1024 * 1024
    """Maximum request body, also after decompression; 256 KiB for requests without tensors."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Memory for request bodies per API process, half of it per tenant; above it, 503."""
    body_seconds: float = 30.0
    """Timeout of a request body, plus a second per 16 KiB of it; then 408."""
    head_seconds: float = 20.0
    """Timeout of a request head; then 408, and the connection is closed."""
    max_connections: int = 0
    """Open connections per API process; 0: as many as its descriptors allow, up to 16,384."""
    max_connections_per_peer: int = 0
    """Open connections per API process from one address; 0: half of all."""
    api_hang_seconds: float = 60.0
    """Replace an API process whose event loop is blocked for this time; 0 never does."""
    long_poll_seconds: float = 25.0
    """How long a poll for a future waits for its result before it returns "not ready"."""
    inline_result_bytes: int = 1024 * 1024
    """For larger results, clients that ask for it first get only the size."""
    jwt: bool = True
    """Have clients exchange their API key for short-lived tokens that name the tenant."""
    jwt_seconds: float = 3600.0
    """Lifetime of a token; exchanging a token for another does not extend it."""
    url_seconds: float = 3600.0
    """Lifetime of a signed download URL."""
    client_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags returned by POST client/config; they override the defaults."""
    dynamic_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags returned by POST client/dynamic_config; they override the defaults."""

    # --- inference endpoints -------------------------------------------------------------------
    inference: bool = True
    """Serve the endpoints of the OpenAI and Anthropic APIs."""
    inference_seconds: float = 600.0
    """How long such a request may take; then its sample is cancelled, and the status is 504."""
    inference_max_streams: int = 512
    """Open streams per API process, half of them per tenant; above it, 503."""
    inference_max_tokens: int = 0
    """Maximum tokens of an answer; 0 is what the context leaves."""
    tool_parsers: Mapping[str, Any] = field(default_factory=dict)
    """How base models write tool calls, if their chat template does not show it: hermes, qwen-xml,
    llama3, mistral, or plain for no tools. With hermes, tools are described in the system message
    if the template has none."""

    # --- queue, sessions, quotas, retention ----------------------------------------------------
    max_request_tokens: int = 524_288
    """Maximum tokens of one forward or forward_backward; above it, 422."""
    custom_losses: bool = True
    """Compute losses that clients upload with create_custom_loss; otherwise clients do."""
    max_jobs_per_tenant: int = 4096
    """Maximum queued jobs of one tenant; above it, 429."""
    max_bytes_per_tenant: int = 1 << 30
    """Maximum payload bytes of one tenant's queued jobs; above it, 429."""
    max_models_per_tenant: int = 0
    """Models of one tenant in unfinished sessions; 0 is unlimited."""
    max_checkpoints_per_tenant: int = 0
    """Stored checkpoints of one tenant; 0 is unlimited."""
    max_stored_bytes_per_tenant: int = 0
    """Bytes of one tenant's stored checkpoints; 0 is unlimited."""
    max_tokens_per_hour: int = 0
    """Tokens that one tenant may train, prefill and sample within an hour; 0 is unlimited."""
    max_sessions_per_hour: int = 0
    """Sessions that one tenant may create within an hour; 0 is unlimited."""
    gap_seconds: float = 5.0
    """How long a job waits for a job with a lower sequence number that has not arrived."""
    session_seconds: float = 120.0
    """A session without a heartbeat for this time is lost; a new heartbeat revives it."""
    snapshot_changes: int = 50
    """Number of operations after which a model's state is written to disk, in the background."""
    snapshot_seconds: float = 60.0
    """Time after which a changed model's state is written to disk."""
    keep_sampler_weights: int = 3
    """Number of unnamed sampler weights that a model keeps: the most recently used."""
    metrics_seconds: float = 90 * 86_400.0
    """Retention of per-step training metrics, from which curves are drawn."""
    metrics_per_session: int = 10_000
    """Number of newest steps of a session whose metrics are kept."""
    max_attempts: int = 3
    """A job fails after the worker has died this many times while running it."""
    fake_seconds: float = 0.0
    """Additional duration of each operation of the fake engine."""
    fake_token_seconds: float = 0.0
    """Duration of each token that the fake engine samples."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; expected one of {', '.join(ENGINES)}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")
        if self.api_processes < 1:
            raise ConfigError(f"api_processes is {self.api_processes}; expected at least 1")
        if not 0 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers is {self.workers}; expected 0 to {MAX_WORKERS}")
        if self.worker_on_demand and self.workers != 1:
            raise ConfigError(f"worker_on_demand needs one worker, but workers is {self.workers}")
        self._check_ranks()
        if self.api_key and not self.api_key.startswith("tml-"):
            raise ConfigError("api_key must begin with 'tml-'")
        if not 1.0 <= self.long_poll_seconds <= 40.0:
            # Official clients give up after 45 seconds.
            raise ConfigError(f"long_poll_seconds is {self.long_poll_seconds}; expected 1 to 40")
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; expected {', '.join(LEVELS)}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device is {self.device!r}; expected auto, cpu, cuda or cuda:N")
        self._check_samplers()
        check_numbers(self)
        self._check_cluster()
        # EngineConfig checks its fields, which have the same names, when it is built.
        _ = self.engine_config

    def _check_ranks(self) -> None:
        shards = self.shards_per_model
        if not is_power_of_two(shards) or shards > MAX_SHARDS:
            raise ConfigError(
                f"gradient_shards is {shards}; expected a power of two up to {MAX_SHARDS}"
            )
        if not self.ranks >= 1 or shards % self.ranks:
            raise ConfigError(
                f"ranks is {self.ranks}, which does not divide the {shards} gradient_shards; use a "
                "power of two up to that number"
            )
        if self.ranks > 1 and self.engine != "local":
            raise ConfigError(f"ranks is {self.ranks}, but the engine {self.engine!r} has only one")
        if self.rendezvous and (self.ranks == 1 or self.workers > 1):
            raise ConfigError("rendezvous needs one worker with at least 2 ranks")

    def _check_samplers(self) -> None:
        for name, value in self.samplers.items():
            if value not in SAMPLERS:
                raise ConfigError(f"the sampler of {name} is {value!r}; expected trainer or vllm")
        for name, value in self.tool_parsers.items():
            if value not in TOOL_PARSERS:
                known = ", ".join(TOOL_PARSERS)
                raise ConfigError(
                    f"the tool parser of {name} is {value!r}; expected one of {known}"
                )

    def _check_cluster(self) -> None:
        if self.stream_host not in {"", "auto"} and not is_ip_address(self.stream_host):
            raise ConfigError(
                f"stream_host is {self.stream_host!r}; expected an IP address or auto"
            )
        if self.cluster not in CLUSTERS:
            raise ConfigError(f"cluster is {self.cluster!r}; expected 'ray' or nothing")
        if not self.cluster:
            if self.pools or self.max_workers:
                raise ConfigError("pools and max_workers need cluster = 'ray'")
            return
        if self.store_url.startswith("sqlite"):
            raise ConfigError(
                "workers on a Ray cluster need a PostgreSQL store, but the store is SQLite",
                hint="Pass --store postgresql://USER@HOST/DATABASE.",
            )
        if self.worker_on_demand:
            raise ConfigError("worker_on_demand cannot be combined with cluster = 'ray'")
        check_pools(self.worker_pools)

    @property
    def worker_pools(self) -> tuple[PoolConfig, ...]:
        """The pools of workers on a cluster."""
        if self.pools:
            return self.pools
        resources = {"CPU": float(self.threads or 1)}
        if self.device.startswith("cuda"):
            resources["GPU"] = 1.0
        pool = PoolConfig(
            name=DEFAULT_POOL,
            ranks=self.ranks,
            min=self.workers,
            max=self.max_workers,
            resources=resources,
        )
        return (pool,)

    @property
    def shards_per_model(self) -> int:
        """The number of gradient shards of new models."""
        most_ranks = max([self.ranks, *(pool.ranks for pool in self.pools)])
        return self.gradient_shards or (1 if most_ranks == 1 else DEFAULT_SHARDS)

    @property
    def store_url(self) -> str:
        """The database's URL."""
        return self.store or f"sqlite:///{Home(self.home).store_file}"

    @property
    def vllm_models(self) -> frozenset[str]:
        """The base models that vLLM samples from."""
        return frozenset(name for name, sampler in self.samplers.items() if sampler == "vllm")

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            is_deterministic=self.deterministic,
            pass_tokens=self.pass_tokens,
            step_tokens=self.step_tokens,
            cache_bytes=self.cache_bytes,
            packed_bytes=self.packed_bytes,
            max_sequences=self.max_sequences,
            memory_bytes=self.memory_bytes,
            adapter_bytes=self.adapter_bytes,
            sampler_bytes=self.sampler_bytes,
            is_nonfinite_applied=self.apply_nonfinite,
            num_engines=max(1, self.workers),
            ranks=self.ranks,
            rendezvous=self.rendezvous,
            shard_base=self.shard_base,
        )

    @property
    def queue_limits(self) -> QueueLimits:
        """The limits of the job queue."""
        return QueueLimits(
            max_jobs_per_tenant=self.max_jobs_per_tenant,
            max_bytes_per_tenant=self.max_bytes_per_tenant,
        )

    @property
    def quotas(self) -> Quotas:
        """The default quotas, for tenants without individual ones."""
        return Quotas(
            models=self.max_models_per_tenant,
            checkpoints=self.max_checkpoints_per_tenant,
            stored_bytes=self.max_stored_bytes_per_tenant,
            tokens_per_hour=self.max_tokens_per_hour,
            sessions_per_hour=self.max_sessions_per_hour,
        )

    @property
    def batch_limits(self) -> BatchLimits:
        """The limits of one batch of jobs."""
        return BatchLimits(
            gap_seconds=self.gap_seconds,
            # Each rank computes a micro-batch at a time.
            max_pass_tokens=self.engine_config.micro_batch_tokens * self.ranks,
        )
