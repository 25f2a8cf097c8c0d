"""Settings of the PyTorch engine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tinkex.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
#: Gradient shards of models on several ranks: the same bits on 1, 2, 4 and 8.
DEFAULT_SHARDS = 8
MAX_SHARDS = 64
_ADDRESS = re.compile(r"\S+:\d{1,5}")


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine computes; the defaults are for a machine without a GPU."""

    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1; auto uses a GPU if there is one."""
    dtype: str = "float32"
    """The dtype of base models; adapters and their optimizer are always float32."""
    threads: int = 0
    """Number of compute threads; 0 uses one per core."""
    is_deterministic: bool = False
    """Compute every request alone, so that results never depend on what else is in the batch."""
    pass_tokens: int = 4096
    """Maximum tokens of one forward and backward pass; more are split."""
    step_tokens: int = 1024
    """Maximum tokens of a training micro-batch; other work runs between micro-batches."""
    cache_bytes: int = 1 << 30
    """Memory for the KV cache, per base model."""
    packed_bytes: int = 1 << 30
    """Memory for copies of weights in a packed layout that is faster on CPUs, per base model;
    0 disables it."""
    max_sequences: int = 64
    """Maximum number of concurrent sequences, per base model; an eighth more are reserved for
    tenants without any."""
    memory_bytes: int = 0
    """Memory for base models; the least recently used are unloaded. 0 means no limit."""
    adapter_bytes: int = 0
    """Memory for models in training; the least recently used are moved to disk. 0 uses a quarter of
    the memory of the machine, or of the GPU."""
    sampler_bytes: int = 1 << 30
    """Memory for checkpoints that are sampled from; the least recently used are dropped."""
    is_nonfinite_applied: bool = False
    """Apply gradients with NaN or infinity instead of refusing the optimizer step."""
    num_engines: int = 1
    """Number of engines on this machine, which share its memory."""

    ranks: int = 1
    """Number of processes that compute each pass together; a power of two."""
    rendezvous: str = ""
    """HOST:PORT where the engine waits for its other ranks; empty starts them on this machine."""
    shard_base: bool = False
    """Divide the layers of base models among the ranks, instead of a copy in each."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        for name in (
            "pass_tokens",
            "step_tokens",
            "cache_bytes",
            "max_sequences",
            "sampler_bytes",
        ):
            value = getattr(self, name)
            if not 1 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected at least 1")
        for name in ("threads", "memory_bytes", "packed_bytes", "adapter_bytes"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected 0 or more")

        if not is_power_of_two(self.ranks) or self.ranks > MAX_SHARDS:
            raise ConfigError(f"ranks is {self.ranks}; expected a power of two up to {MAX_SHARDS}")
        if self.shard_base and self.ranks == 1:
            raise ConfigError("shard_base needs at least 2 ranks")
        if self.rendezvous and not _ADDRESS.fullmatch(self.rendezvous):
            raise ConfigError(f"rendezvous is {self.rendezvous!r}; expected HOST:PORT")

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum tokens of a micro-batch of short examples."""
        return min(self.pass_tokens, self.step_tokens)
