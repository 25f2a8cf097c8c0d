"""Settings of the server; `config_sources` reads them."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.engine.config import EngineConfig
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.jobs.fair_queue import BatchLimits
from tinkex.jobs.queue import QueueLimits
from tinkex.logs import LEVELS
from tinkex.store.quotas import Quotas

ENGINES = ("local", "fake")
#: The tenant of the key that a home is created with.
DEFAULT_TENANT = "default"
_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")
_NOT_NEGATIVE = (
    "max_connections",
    "max_connections_per_peer",
    "api_hang_seconds",
    "idle_stop_seconds",
    "inline_result_bytes",
    "gap_seconds",
    "fake_seconds",
    "max_models_per_tenant",
    "max_checkpoints_per_tenant",
    "max_stored_bytes_per_tenant",
    "max_tokens_per_hour",
    "max_sessions_per_hour",
)
_POSITIVE = (
    "stop_seconds",
    "max_body_bytes",
    "max_inflight_bytes",
    "body_seconds",
    "head_seconds",
    "jwt_seconds",
    "url_seconds",
    "max_request_tokens",
    "max_jobs_per_tenant",
    "max_bytes_per_tenant",
    "session_seconds",
    "snapshot_changes",
    "snapshot_seconds",
    "keep_sampler_weights",
    "metrics_seconds",
    "metrics_per_session",
    "max_attempts",
)
#: The largest value of settings that would otherwise switch a protection off.
_MAXIMUM = {
    "head_seconds": 600.0,
    "body_seconds": 600.0,
    "jwt_seconds": 30 * 86400.0,
    "max_connections": 1 << 20,
    "max_connections_per_peer": 1 << 20,
}
#: A process is not to be taken for blocked because the machine is busy.
MIN_HANG_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything a server needs to know; every field is a TOML key and a TINKEX_ variable."""

    home: Path
    """Where the server keeps everything: database, checkpoints, key."""
    host: str = "127.0.0.1"
    """The address to listen on. Others than loopback need a key first."""
    port: int = 8000
    """The port to listen on; 0 takes any that is free."""
    store: str = ""
    """The database's URL; empty is SQLite in the home."""
    engine: str = "local"
    """Who computes: local is PyTorch here; fake is arithmetic on a tiny model, for tests."""
    models: tuple[str, ...] = ()
    """Base models to serve beside the home's, as NAME=PATH or the id of one on the hub."""
    register_tokenizers: bool = True
    """Keep copies of the tokenizers of tinkex/tiny and of `models` in the cache of Hugging Face,
    where the official SDK looks for them; false removes them. `tinkex model add` makes its own."""
    api_key: str = field(default="", repr=False)
    """A first key, which the default tenant gets if it is not there yet."""
    api_processes: int = 1
    """How many processes answer HTTP."""
    log_level: str = "info"
    """What is said on stderr: debug, info, warning or error."""
    idle_stop_seconds: float = 0.0
    """Stop after so long without a request; 0 runs for ever."""
    worker_on_demand: bool = False
    """Start the worker, which loads PyTorch, with the first work instead of at once. A server that
    a command starts only to read from it does so."""
    stop_seconds: float = 30.0
    """How long a stopping server lets its processes finish before it ends them."""

    # --- how the engine computes ---------------------------------------------------------------
    device: str = "auto"
    """Where base models compute: cpu, cuda, cuda:1; auto takes a GPU if there is one."""
    dtype: str = "float32"
    """What base models compute with: float32, bfloat16 or float16; adapters are always float32."""
    threads: int = 0
    """Threads that the engine computes with; 0 takes one per core."""
    deterministic: bool = False
    """Give every request a pass of its own, so that its bits never depend on its company."""
    pass_tokens: int = 4096
    """The most tokens that one forward and backward pass holds; more run one after the other."""
    step_tokens: int = 1024
    """The most tokens of a micro-batch of training; other work runs between two of them."""
    cache_bytes: int = 1 << 30
    """Memory for keys and values of running samples, per base model."""
    packed_bytes: int = 1 << 30
    """Memory for second copies of weights that make passes faster on a CPU, per base model."""
    max_sequences: int = 64
    """The most sequences that are sampled at once, per base model; an eighth more for others."""
    memory_bytes: int = 0
    """Memory for base models; those unused for longest make room. 0 keeps all."""
    adapter_bytes: int = 0
    """Memory for models in training; those idle for longest go to disk until they are used again.
    0 takes a quarter of the memory of the machine, or of the GPU."""
    sampler_bytes: int = 1 << 30
    """Memory for saved weights that samples are drawn from; those idle for longest are dropped."""
    apply_nonfinite: bool = False
    """Let an optimizer step apply a gradient that has NaN or infinity, which else is refused."""

    # --- what a client may send, and is told -------------------------------------------------
    max_body_bytes: int = 64 * 1024 * 1024
    """The largest request body, also after it is unpacked; without tensors 256 KiB is the most."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Request bodies that an API process holds at once; half of it for one tenant. Then 503."""
    body_seconds: float = 30.0
    """How long a request body may take, and a second more per 16 KiB of it; then 408."""
    head_seconds: float = 20.0
    """How long the head of a request may take; then 408, and the connection is closed."""
    max_connections: int = 0
    """Open connections of an API process; 0: as many as its descriptors allow, up to 16,384."""
    max_connections_per_peer: int = 0
    """Open connections of an API process from one address; 0 is half of all."""
    api_hang_seconds: float = 60.0
    """An API process that does nothing for so long is replaced; 0 never does."""
    long_poll_seconds: float = 25.0
    """How long a question about a promise is held before the answer is "not yet"."""
    inline_result_bytes: int = 1024 * 1024
    """Larger results are announced by their size first, to clients that ask for it."""
    jwt: bool = True
    """Have clients exchange their key for short-lived tokens, which also say whose key it is."""
    jwt_seconds: float = 3600.0
    """How long a token is good; a token that is exchanged for another keeps its end."""
    url_seconds: float = 3600.0
    """How long a signed download URL is good."""
    client_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags for POST client/config, over the defaults."""
    dynamic_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags for POST client/dynamic_config, over the defaults."""

    # --- queue, sessions, memory ---------------------------------------------------------------
    max_request_tokens: int = 524_288
    """The most tokens of one forward or forward_backward; a longer one is refused with 422."""
    max_jobs_per_tenant: int = 4096
    """Promises of one tenant that may wait; more are refused with 429."""
    max_bytes_per_tenant: int = 1 << 30
    """Payload bytes of one tenant's promises that may wait."""
    max_models_per_tenant: int = 0
    """Models of one tenant in sessions that are not finished; 0 is unlimited."""
    max_checkpoints_per_tenant: int = 0
    """Stored checkpoints of one tenant; 0 is unlimited."""
    max_stored_bytes_per_tenant: int = 0
    """Bytes of one tenant's stored checkpoints; 0 is unlimited."""
    max_tokens_per_hour: int = 0
    """Tokens that one tenant may train, read and sample within an hour; 0 is unlimited."""
    max_sessions_per_hour: int = 0
    """Sessions that one tenant may create within an hour; 0 is unlimited."""
    gap_seconds: float = 5.0
    """How long work waits for work with a lower number that has not arrived."""
    session_seconds: float = 120.0
    """A session without a heartbeat for so long is over; a new heartbeat brings it back."""
    snapshot_changes: int = 50
    """After so many operations a model's state is written to disk, in the background."""
    snapshot_seconds: float = 60.0
    """After so long a changed model's state is written to disk."""
    keep_sampler_weights: int = 3
    """How many sampler weights without a name a model keeps: those that were used last."""
    metrics_seconds: float = 90 * 86_400.0
    """How long the metrics of training steps are kept, of which curves are drawn."""
    metrics_per_session: int = 10_000
    """How many of the newest steps of a session keep their metrics."""
    max_attempts: int = 3
    """Work during which the worker died so often is given up."""
    fake_seconds: float = 0.0
    """How long each operation of the fake engine takes besides its arithmetic."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; expected one of {', '.join(ENGINES)}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")
        if self.api_processes < 1:
            raise ConfigError(f"api_processes is {self.api_processes}; expected at least 1")
        if self.api_key and not self.api_key.startswith("tml-"):
            raise ConfigError("api_key must begin with 'tml-'")
        if not 1.0 <= self.long_poll_seconds <= 40.0:
            # Official clients give up after 45 seconds.
            raise ConfigError(f"long_poll_seconds is {self.long_poll_seconds}; expected 1 to 40")
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; expected {', '.join(LEVELS)}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device is {self.device!r}; expected auto, cpu, cuda or cuda:N")
        self._check_numbers()
        # Its own checks name the same fields.
        _ = self.engine_config

    def _check_numbers(self) -> None:
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected a number from 0")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; expected more than 0")
        for name, most in _MAXIMUM.items():
            value = getattr(self, name)
            if value > most:
                raise ConfigError(f"{name} is {value}; expected at most {most:g}")
        if 0 < self.api_hang_seconds < MIN_HANG_SECONDS:
            raise ConfigError(
                f"api_hang_seconds is {self.api_hang_seconds}; expected {MIN_HANG_SECONDS:g} or "
                "more, or 0 to turn it off"
            )

    @property
    def store_url(self) -> str:
        """The database's URL."""
        return self.store or f"sqlite:///{Home(self.home).store_file}"

    @property
    def engine_config(self) -> EngineConfig:
        """How the engine computes."""
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
        )

    @property
    def queue_limits(self) -> QueueLimits:
        """How much may wait."""
        return QueueLimits(
            max_jobs_per_tenant=self.max_jobs_per_tenant,
            max_bytes_per_tenant=self.max_bytes_per_tenant,
        )

    @property
    def quotas(self) -> Quotas:
        """What tenants may have that the operator gave no quotas of their own."""
        return Quotas(
            models=self.max_models_per_tenant,
            checkpoints=self.max_checkpoints_per_tenant,
            stored_bytes=self.max_stored_bytes_per_tenant,
            tokens_per_hour=self.max_tokens_per_hour,
            sessions_per_hour=self.max_sessions_per_hour,
        )

    @property
    def batch_limits(self) -> BatchLimits:
        """How much one turn of the engine may take."""
        return BatchLimits(
            gap_seconds=self.gap_seconds,
            max_pass_tokens=self.engine_config.micro_batch_tokens,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_ip_address(host: str) -> bool:
    """Whether this is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
