"""Saved adapters that are ready to be sampled from."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

from tinkex.engine.checkpoints.files import read_adapter
from tinkex.engine.checkpoints.summaries import WEIGHTS_NAME
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.sampling.runner import SamplerAdapter
from tinkex.engine.state import ALPHA
from tinkex.errors import InvalidInput
from tinkex.nn.host import HostedModel

_Key: TypeAlias = tuple[Path, int, int]


class SamplerShelf:
    """Weights read from checkpoints; those not used for longest make room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """The memory of everything that is kept ready."""
        self._saved: OrderedDict[_Key, tuple[SamplerAdapter, int]] = OrderedDict()

    def find(self, source: SamplerSource, host: HostedModel) -> SamplerAdapter | None:
        """The adapter of a source; None for a base model alone."""
        if source.directory is None:
            return None
        # A directory may be replaced by another of the same name: the file tells them apart.
        key = _identify(source.directory)
        if key in self._saved:
            self._saved.move_to_end(key)
            return self._saved[key][0]
        adapter, num_bytes = _load(key, source, host)
        self._saved[key] = adapter, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._saved) > 1:
            _, (_, freed) = self._saved.popitem(last=False)
            self.num_bytes -= freed
        return adapter

    def clear(self) -> None:
        """Forget what was read."""
        self._saved.clear()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._saved)


def _identify(directory: Path) -> _Key:
    try:
        status = (directory / WEIGHTS_NAME).stat()
    except OSError:
        raise InvalidInput(f"there are no saved weights in {directory.name!r}") from None
    return directory, status.st_ino, status.st_mtime_ns


def _load(key: _Key, source: SamplerSource, host: HostedModel) -> tuple[SamplerAdapter, int]:
    layout, weights = read_adapter(key[0], source.base_model, host.lora_targets)
    flat = weights.to(host.device)
    adapter = SamplerAdapter(
        key=key, scale=ALPHA / layout.rank, weights=layout.views(flat), dtype=host.dtype
    )
    return adapter, flat.nbytes + adapter.num_bytes
