"""Saving beside training: a thread copies what is to be saved, then writes it to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.checkpoint.disk import convert_disk_full
from tinkex.checkpoint.retention import StepRetention
from tinkex.pipeline.step_files import StepContent, write_step
from tinkex.pipeline.steps import prune_steps

#: Where in a tree a value is.
Place = tuple[object, ...]
Buffers = dict[Place, Tensor]
#: Writes something else from the same copy of the weights.
AlsoWrite = Callable[[Mapping[str, Tensor]], None]


class Snapshot:
    """A copy of a tree of tensors in memory that is used again for the next copy.

    Fresh memory costs several times the copy itself, for the system hands it out page by page.
    """

    def __init__(self) -> None:
        self._buffers: Buffers = {}

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """The same tree with copies for tensors; tensors that are one stay one."""
        before, self._buffers = self._buffers, {}
        return self._copy((), tree, before, {})

    def _copy(self, path: Place, value: Any, before: Buffers, taken: Buffers) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value, before, taken)
        if isinstance(value, Mapping):
            pairs = value.items()
            return {key: self._copy((*path, key), item, before, taken) for key, item in pairs}
        if isinstance(value, list | tuple):
            items = [self._copy((*path, at), item, before, taken) for at, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(self, path: Place, value: Tensor, before: Buffers, taken: Buffers) -> Tensor:
        identity = (value.data_ptr() or id(value), value.dtype, *value.shape, *value.stride())
        if identity in taken:
            return taken[identity]
        buffer = before.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        buffer.copy_(value)
        self._buffers[path] = taken[identity] = buffer
        return buffer


class StepWriter:
    """Writes one step at a time in a thread; who saves faster than the disk writes, waits."""

    def __init__(self, root: Path, retention: StepRetention) -> None:
        self._root = root
        self._retention = retention
        self._snapshot = Snapshot()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinkex-writer")
        self._copying: Future[StepContent] | None = None
        self._pending: Future[Path] | None = None
        self.went_back_to: int | None = None
        """The step that somebody chose to go on from; the first write sets later ones aside."""

    def save(
        self,
        step: int,
        content: StepContent,
        *,
        best: int | None = None,
        also: AlsoWrite | None = None,
    ) -> None:
        """Have the content copied and written; raises what the write before it failed with.

        Nothing in it may change before `wait_for_copy` returns.
        """
        self.wait()
        self._copying = self._pool.submit(self._copy, content)
        self._pending = self._pool.submit(self._write, step, self._copying, best, also)

    def _copy(self, content: StepContent) -> StepContent:
        copy = self._snapshot.take({"weights": content.weights, "optimizer": content.optimizer})
        return replace(content, weights=copy["weights"], optimizer=copy["optimizer"])

    def _write(
        self, step: int, copying: Future[StepContent], best: int | None, also: AlsoWrite | None
    ) -> Path:
        content = copying.result()
        path = write_step(self._root, step, content, went_back_to=self.went_back_to)
        self.went_back_to = None
        if also is not None:
            # It may write with any library.
            with convert_disk_full(self._root):
                also(content.weights)
        prune_steps(self._root, self._retention, best=best, newest=step)
        return path

    def wait_for_copy(self) -> None:
        """Wait until what is being saved may change; a copy that failed is raised by `wait`."""
        if self._copying is not None:
            self._copying.exception()
            self._copying = None

    @property
    def has_failed(self) -> bool:
        """True when the last write is over and did not work."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> Path | None:
        """Wait for the write under way; returns where it went, raises what it failed with."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> Path | None:
        """Wait for the last write, and end the thread."""
        try:
            return self.wait()
        finally:
            self._pool.shutdown()
