"""Settings of the engine that runs on PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinkex.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine computes; the defaults suit a machine without a GPU."""

    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1; auto takes a GPU if there is one."""
    dtype: str = "float32"
    """What base models compute with; adapters and their optimizer are always float32."""
    threads: int = 0
    """Threads to compute with; 0 takes one per core."""
    is_deterministic: bool = False
    """Give every request a pass of its own, so that its bits never depend on its company."""
    pass_tokens: int = 4096
    """The most tokens that one forward and backward pass holds; more run one after the other."""
    step_tokens: int = 1024
    """The most tokens of a micro-batch of training; other work runs between two of them."""
    cache_bytes: int = 1 << 30
    """Memory for keys and values of running samples, per base model."""
    packed_bytes: int = 1 << 30
    """Memory for second copies of weights, laid out so that passes are faster on a
    CPU, per base model; 0 keeps none."""
    max_sequences: int = 64
    """The most sequences that are sampled at once, per base model; an eighth more for tenants that
    have none."""
    memory_bytes: int = 0
    """Memory for base models; those idle for longest make room. 0 keeps all."""
    adapter_bytes: int = 0
    """Memory for models in training; those idle for longest go to disk until they are used again.
    0 takes a quarter of the memory of the machine, or of the GPU."""
    sampler_bytes: int = 1 << 30
    """Memory for saved weights that samples are drawn from; those idle for longest are dropped."""
    is_nonfinite_applied: bool = False
    """Let an optimizer step apply a gradient that has NaN or infinity, which else is refused."""

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

    @property
    def micro_batch_tokens(self) -> int:
        """How many tokens of shorter examples are computed together."""
        return min(self.pass_tokens, self.step_tokens)
