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
TreePath = tuple[object, ...]
TensorBuffers = dict[TreePath, Tensor]
#: Writes something else from the same copy of the weights.
ExtraWriter = Callable[[Mapping[str, Tensor]], None]


class TensorSnapshot:
    """A copy of a tree of tensors in memory that is used again for the next copy.

    Fresh memory costs several times the copy itself, for the system hands it out page by page.
    """

    def __init__(self) -> None:
        self._buffers: TensorBuffers = {}

    @torch.no_grad()
    def copy_tree(self, tree: Any) -> Any:
        """The same tree with copies for tensors; tensors that are one stay one."""
        before, self._buffers = self._buffers, {}
        return self._copy((), tree, before, {})

    def _copy(
        self, path: TreePath, value: Any, reusable: TensorBuffers, copied: TensorBuffers
    ) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value, reusable, copied)
        if isinstance(value, Mapping):
            pairs = value.items()
            return {key: self._copy((*path, key), item, reusable, copied) for key, item in pairs}
        if isinstance(value, list | tuple):
            items = [
                self._copy((*path, at), item, reusable, copied) for at, item in enumerate(value)
            ]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(
        self, path: TreePath, value: Tensor, reusable: TensorBuffers, copied: TensorBuffers
    ) -> Tensor:
        identity = (value.data_ptr() or id(value), value.dtype, *value.shape, *value.stride())
        if identity in copied:
            return copied[identity]
        buffer = reusable.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        buffer.copy_(value)
        self._buffers[path] = copied[identity] = buffer
        return buffer


class StepWriter:
    """Writes one step at a time in a thread; who saves faster than the disk writes, waits."""

    def __init__(self, root: Path, retention: StepRetention) -> None:
        self._root = root
        self._retention = retention
        self._snapshot = TensorSnapshot()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinkex-writer")
        self._copying: Future[StepContent] | None = None
        self._pending: Future[Path] | None = None
        self.rewound_to: int | None = None
        """The step that somebody chose to go on from; the first write sets later ones aside."""

    def save(
        self,
        step: int,
        content: StepContent,
        *,
        best: int | None = None,
        write_extra: ExtraWriter | None = None,
    ) -> None:
        """Have the content copied and written; raises what the write before it failed with.

        Nothing in it may change before `wait_for_copy` returns.
        """
        self.wait()
        self._copying = self._pool.submit(self._copy, content)
        self._pending = self._pool.submit(self._write, step, self._copying, best, write_extra)

    def _copy(self, content: StepContent) -> StepContent:
        copy = self._snapshot.copy_tree(
            {"weights": content.weights, "optimizer": content.optimizer}
        )
        return replace(content, weights=copy["weights"], optimizer=copy["optimizer"])

    def _write(
        self,
        step: int,
        copying: Future[StepContent],
        best: int | None,
        write_extra: ExtraWriter | None,
    ) -> Path:
        content = copying.result()
        path = write_step(self._root, step, content, rewound_to=self.rewound_to)
        self.rewound_to = None
        if write_extra is not None:
            # It may write with any library.
            with convert_disk_full(self._root):
                write_extra(content.weights)
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
