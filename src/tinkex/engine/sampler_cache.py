"""Saved adapters that are ready to be sampled from."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

from tinkex.engine.adapters import LORA_ALPHA
from tinkex.engine.checkpoints.adapter_files import read_adapter
from tinkex.engine.checkpoints.metadata import WEIGHTS_NAME
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.sampling.continuous_batching import SamplerAdapter
from tinkex.errors import InvalidInput
from tinkex.nn.hosted_model import HostedModel

_CacheKey: TypeAlias = tuple[Path, int, int]


class SamplerAdapterCache:
    """Weights read from checkpoints; those not used for longest make room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """The memory of everything that is kept ready."""
        self._entries: OrderedDict[_CacheKey, tuple[SamplerAdapter, int]] = OrderedDict()

    def get_or_load(
        self, source: SamplerSource, hosted_model: HostedModel
    ) -> SamplerAdapter | None:
        """The adapter of a source; None for a base model alone."""
        if source.directory is None:
            return None
        # A directory may be replaced by another of the same name: the file tells them apart.
        key = _cache_key(source.directory)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        adapter, num_bytes = _load_adapter(key, source, hosted_model)
        self._entries[key] = adapter, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
        return adapter

    def clear(self) -> None:
        """Forget what was read."""
        self._entries.clear()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def _cache_key(directory: Path) -> _CacheKey:
    try:
        status = (directory / WEIGHTS_NAME).stat()
    except OSError:
        raise InvalidInput(f"there are no saved weights in {directory.name!r}") from None
    return directory, status.st_ino, status.st_mtime_ns


def _load_adapter(
    key: _CacheKey, source: SamplerSource, hosted_model: HostedModel
) -> tuple[SamplerAdapter, int]:
    layout, weights = read_adapter(key[0], source.base_model, hosted_model.lora_targets)
    flat = weights.to(hosted_model.device)
    adapter = SamplerAdapter(
        key=key,
        scale=LORA_ALPHA / layout.rank,
        weights=layout.views(flat),
        dtype=hosted_model.dtype,
    )
    return adapter, flat.nbytes + adapter.num_bytes
