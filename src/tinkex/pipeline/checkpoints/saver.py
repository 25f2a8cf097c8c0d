"""Save checkpoints in a background thread while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from tinkex.checkpoint.retention import StepRetention
from tinkex.errors import CheckpointError
from tinkex.logs import get_logger
from tinkex.nn.ranks import DistributedContext
from tinkex.pipeline.checkpoints.step_directory import (
    prune_steps,
    remove_interrupted_saves,
    step_name,
    step_number,
)
from tinkex.pipeline.checkpoints.step_files import (
    StepContent,
    check_disk_space,
    count_tensor_bytes,
    write_step,
)
from tinkex.pipeline.optimizers import CombinedOptimizer
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.settings_sources import plain_values
from tinkex.pipeline.stage_interface import Stage
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.train_state import RngState, TrainState
from tinkex.pipeline.weights import named_weights
from tinkex.system.disk_errors import convert_disk_full

#: Path of a value in a nested structure.
TreePath = tuple[object, ...]
TensorBuffers = dict[TreePath, Tensor]
TreeT = TypeVar("TreeT")
#: Writes another file from the same copy of the weights.
ExtraWriter = Callable[[Mapping[str, Tensor]], None]


class TensorSnapshot:
    """Copies nested tensors into buffers that are reused for the next copy.

    Page faults on fresh memory would cost several times as much as the copy.
    """

    def __init__(self) -> None:
        self._buffers: TensorBuffers = {}

    @torch.no_grad()
    def copy_tree(self, tree: TreeT) -> TreeT:
        """Return the structure with copied tensors; shared tensors stay shared."""
        before, self._buffers = self._buffers, {}
        return cast("TreeT", self._copy((), tree, before, {}))

    def _copy(
        self, path: TreePath, value: object, reusable: TensorBuffers, copied: TensorBuffers
    ) -> object:
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value, reusable, copied)
        if isinstance(value, Mapping):
            pairs = value.items()
            return {key: self._copy((*path, key), item, reusable, copied) for key, item in pairs}
        if isinstance(value, list | tuple):
            items = [
                self._copy((*path, index), item, reusable, copied)
                for index, item in enumerate(value)
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
    """Writes one step at a time in a thread; a save waits for the previous write."""

    def __init__(self, root: Path, retention: StepRetention) -> None:
        self._root = root
        self._retention = retention
        self._snapshot = TensorSnapshot()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinkex-writer")
        self._copying: Future[StepContent] | None = None
        self._pending: Future[Path] | None = None
        self.rewound_to: int | None = None
        """The step that the user chose to resume from; the first write archives later steps."""

    def save(
        self,
        step: int,
        content: StepContent,
        *,
        best: int | None = None,
        write_extra: ExtraWriter | None = None,
    ) -> None:
        """Start to copy and write the content; raises the error of the previous write.

        The content must not change before `wait_for_copy` returns.
        """
        self.wait()
        self._copying = self._pool.submit(self._copy, content)
        self._pending = self._pool.submit(self._write, step, self._copying, best, write_extra)

    def _copy(self, content: StepContent) -> StepContent:
        weights, optimizer = self._snapshot.copy_tree((content.weights, content.optimizer))
        return replace(content, weights=weights, optimizer=optimizer)

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
            # Libraries report a full disk in different ways.
            with convert_disk_full(self._root):
                write_extra(content.weights)
        prune_steps(self._root, self._retention, best=best, newest=step)
        return path

    def wait_for_copy(self) -> None:
        """Wait until the saved content may change; `wait` raises the error of a failed copy."""
        if self._copying is not None:
            self._copying.exception()
            self._copying = None

    @property
    def has_failed(self) -> bool:
        """True if the last write has failed."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> Path | None:
        """Wait for the current write; returns its path or raises its error."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> Path | None:
        """Wait for the last write and end the thread."""
        try:
            return self.wait()
        finally:
            self._pool.shutdown()


#: The weight and the two moments of AdamW.
_TENSORS_PER_WEIGHT = 3

log = get_logger(__name__)


class Saver:
    """Saves the step checkpoints of a run."""

    def __init__(
        self,
        stage: Stage,
        settings: TrainSettings,
        ranks: DistributedContext,
        config: Mapping[str, object],
    ) -> None:
        self._stage, self._settings, self._ranks, self._config = stage, settings, ranks, config
        retention = StepRetention(
            keep_last=settings.keep_last_checkpoints, keep_every=settings.keep_every
        )
        self._writer = StepWriter(settings.checkpoint_root, retention)
        self._exit_stack = ExitStack()
        self._saved_at = time.monotonic()
        self._has_saved = False
        self.saved_step: int | None = None
        """The newest step that is saved or being saved."""

    def prepare(self) -> None:
        """Lock the checkpoint root, remove interrupted saves and check the disk space."""
        root = self._settings.checkpoint_root
        self._exit_stack.enter_context(lock_directory(root))
        remove_interrupted_saves(root)
        check_disk_space(
            root, _TENSORS_PER_WEIGHT * count_tensor_bytes(named_weights(self._stage.model))
        )

    def rewind_to(self, path: Path) -> None:
        """Make the first save archive the steps after the one the user resumes from.

        If that step is in another directory, all steps of this root are archived.
        """
        is_here = path.parent.resolve() == self._settings.checkpoint_root.resolve()
        self._writer.rewound_to = step_number(path) if is_here else -1

    @property
    def is_overdue(self) -> bool:
        """True if the time since the last save exceeds save_interval_seconds."""
        seconds = time.monotonic() - self._saved_at
        limit = self._settings.save_interval_seconds
        return self._ranks.is_rank_zero and bool(limit) and seconds >= limit

    @property
    def has_failed(self) -> bool:
        """True if the last save failed."""
        return self._writer.has_failed

    def raise_failure(self) -> None:
        """Raise the error of the failed save."""
        self._writer.wait()
        raise CheckpointError("rank 0 could not save", hint="See the message of rank 0.")

    def save(
        self,
        state: TrainState,
        optimizer: CombinedOptimizer,
        rng: RngState,
        *,
        overwrite: bool = False,
    ) -> None:
        """Save a step unless it is already saved; all ranks must call it."""
        if state.global_step == self.saved_step and not overwrite:
            return
        rngs = self._ranks.all_gather(rng)
        self.saved_step, self._saved_at = state.global_step, time.monotonic()
        if not self._ranks.is_rank_zero:
            return
        record = {
            **state.to_record(),
            "args": plain_values(self._settings),
            "seed": self._settings.seed,
        }
        content = StepContent(
            weights=named_weights(self._stage.model),
            optimizer={"optimizer": optimizer.state_dict(), "scaler": {}},
            state=record,
            rng=rngs,
            config=self._config,
        )
        self._writer.save(
            state.global_step, content, best=state.best_step, write_extra=self._write_legacy
        )
        self._has_saved = True

    def save_if_due(
        self, state: TrainState, optimizer: CombinedOptimizer, rng: RngState, is_due: bool
    ) -> None:
        """Save if `is_due` (the same on all ranks) or if the step number is due."""
        if is_due or self._settings.is_save_due(state.global_step):
            self.save(state, optimizer, rng)

    def wait_for_copy(self) -> None:
        """Wait until a running save has copied the weights."""
        self._writer.wait_for_copy()

    def save_on_error(self, state: TrainState, optimizer: CombinedOptimizer, rng: RngState) -> None:
        """Save before an error ends the run; a failed save is only logged."""
        try:
            self.save(state, optimizer, rng)
            self._writer.wait()
        except (CheckpointError, OSError) as error:
            log.warning("the last update could not be saved: %s", error)
        # torchrun kills the other ranks when one exits, and rank 0 may still be writing.
        self._ranks.all_gather(None)

    def _write_legacy(self, weights: Mapping[str, Tensor]) -> None:
        self._stage.write_legacy(weights, self._settings.out_dir)

    def finish(self) -> None:
        """Wait for the last write; without any save, write at least the single-file weights."""
        self._writer.wait()
        if self._ranks.is_rank_zero and not self._has_saved:
            self._write_legacy(named_weights(self._stage.model))

    def wait(self) -> Path | None:
        """Wait until the newest step is on disk; returns its path on rank 0."""
        self._writer.wait()
        if not self._ranks.is_rank_zero or self.saved_step is None:
            return None
        return self._settings.checkpoint_root / step_name(self.saved_step)

    def close(self) -> None:
        """Wait for the last write, end the thread and release the lock."""
        with self._exit_stack:
            self._writer.close()
