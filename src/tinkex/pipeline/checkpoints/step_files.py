"""Files of a step checkpoint: write them atomically and read them back exactly."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO, cast

import torch
from torch import Tensor

from tinkex.checkpoint.manifest import write_manifest
from tinkex.display import format_bytes
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.pipeline.checkpoints.step_directory import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    REPLACED_PREFIX,
    RNG_FILE,
    STATE_FILE,
    archive_later_steps,
    step_name,
    write_latest,
)
from tinkex.pipeline.train_state import RngState
from tinkex.settings import package_version
from tinkex.system.atomic import fsync_tree, new_directory

_JSON_HINT = "Save numbers, text, true, false, null, lists, and dictionaries whose keys are text."


def encode_lossless_json(value: dict[str, object], label: str) -> bytes:
    """Encode a dictionary; raises InvalidInput for a value that JSON cannot represent exactly."""
    try:
        _check_json_value(value, label)
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    except RecursionError:
        raise InvalidInput(
            f"{label} is nested too deeply, or contains itself", hint=_JSON_HINT
        ) from None
    except UnicodeEncodeError:
        raise InvalidInput(f"{label} has text that is not valid Unicode", hint=_JSON_HINT) from None


def _check_json_value(value: object, location: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(
                    f"{location} has the key {key!r}, which is not text", hint=_JSON_HINT
                )
            _check_json_value(item, f"{location}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json_value(item, f"{location}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"{location} is {value}, which JSON cannot hold", hint=_JSON_HINT)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InvalidInput(
            f"{location} is of type {type(value).__name__}, which JSON cannot hold", hint=_JSON_HINT
        )


def to_readable_json(value: object) -> object:
    """Convert a value to JSON for display; unsupported types become text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


FORMAT_VERSION = 1
#: Bytes that a save needs in addition to its tensors.
_MARGIN_BYTES = 1 << 20
_FREE_SPACE_HINT = "Free some space or choose another --ckpt_dir; earlier checkpoints are intact."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """Content of a step checkpoint."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, object]
    """`optimizer` and `scaler`."""
    state: Mapping[str, object]
    rng: Sequence[RngState] = field(default_factory=list)
    """RNG state per rank; empty in the older format."""
    config: Mapping[str, object] | None = None
    """Settings that must not change on resume; None in the older format."""


def write_step(
    root: Path, step: int, content: StepContent, *, rewound_to: int | None = None
) -> Path:
    """Write a step directory atomically; an existing version is replaced only at the end.

    If the run was rewound, the steps after `rewound_to` are archived just before.
    """
    final = root / step_name(step)
    texts = _encode_json_files(content)
    root.mkdir(parents=True, exist_ok=True)
    check_disk_space(root, count_tensor_bytes(content))
    aside = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    try:
        with new_directory(final) as scratch:
            _write_files(scratch, content, texts)
            write_manifest(scratch)
            # Slow, so sync first: while the old version is moved aside, the step does not exist.
            fsync_tree(scratch)
            if rewound_to is not None:
                archive_later_steps(root, rewound_to)
            _move_aside(final, aside)
    except (OSError, RuntimeError) as error:
        _restore_aside(aside, final)
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(
            f"step {step} could not be saved in {root}: "
            f"{reason or str(error).partition(chr(10))[0]}",
            hint=_FREE_SPACE_HINT,
        ) from error
    shutil.rmtree(aside, ignore_errors=True)
    write_latest(root, final)
    return final


def _encode_json_files(content: StepContent) -> dict[str, bytes]:
    """Encode the JSON files of a step; raises InvalidInput for unsupported values."""
    state = dict(content.state)
    if "args" in state:
        # For display only: options may contain devices, paths and functions.
        state["args"] = to_readable_json(state["args"])
    texts = {STATE_FILE: encode_lossless_json(state, "state")}
    if content.config is not None:
        config = {**content.config, "versions": _versions()}
        texts[CONFIG_FILE] = encode_lossless_json(config, "config")
    return texts


def _write_files(directory: Path, content: StepContent, texts: Mapping[str, bytes]) -> None:
    save_tensors(directory / MODEL_FILE, dict(content.weights))
    save_tensors(directory / OPTIMIZER_FILE, dict(content.optimizer))
    if content.rng:
        save_tensors(directory / RNG_FILE, list(content.rng))
    for name, text in texts.items():
        (directory / name).write_bytes(text)


@cache
def _versions() -> dict[str, object]:
    """Return the software versions, for information only."""
    return {
        "format": FORMAT_VERSION,
        "tinkex": package_version(),
        "torch": torch.__version__,
        "revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """Return the git commit of the working directory, with `-dirty` if changed, or None."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    # Without the optional lock, this does not interfere with a concurrent commit.
    variables = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, env=variables
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def save_tensors(path: Path, value: object) -> None:
    """Write a file with torch.save; a failed write raises the original OSError.

    The zip writer of torch would replace it by a RuntimeError.
    """
    with path.open("wb") as file:
        target = _ErrorRecordingFile(file)
        try:
            torch.save(value, cast("BinaryIO", target))
        except RuntimeError:
            if target.error is None:
                raise
        if target.error is not None:
            raise target.error


class _ErrorRecordingFile:
    """File wrapper that records the first write error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write to the file."""
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Flush the file."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


def _move_aside(final: Path, aside: Path) -> None:
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)


def _restore_aside(aside: Path, final: Path) -> None:
    if aside.exists() and not final.exists():
        with suppress(OSError):
            aside.rename(final)


def check_disk_space(
    root: Path, needed: int, free_bytes: Callable[[Path], int] | None = None
) -> None:
    """Raise CheckpointError if the disk has too little free space for a save."""
    free = free_bytes(root) if free_bytes is not None else shutil.disk_usage(root).free
    if free < needed + _MARGIN_BYTES:
        raise CheckpointError(
            f"{root} has {format_bytes(free)} free, but a checkpoint needs "
            f"{format_bytes(needed + _MARGIN_BYTES)}",
            hint=_FREE_SPACE_HINT,
        )


def count_tensor_bytes(value: object) -> int:
    """Count the bytes of all tensors in a structure; shared tensors count once."""
    seen: dict[int, int] = {}
    _add_tensor_bytes(value, seen)
    return sum(seen.values())


def _add_tensor_bytes(value: object, seen: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        seen[value.data_ptr() or id(value)] = value.numel() * value.element_size()
    elif isinstance(value, StepContent):
        _add_tensor_bytes([value.weights, value.optimizer, value.rng], seen)
    elif isinstance(value, Mapping):
        _add_tensor_bytes(list(value.values()), seen)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_tensor_bytes(item, seen)


def read_step(path: Path, device: str | torch.device = "cpu") -> StepContent:
    """Read the files of a step; raises CheckpointError with the name of an unreadable file."""
    has_rng, has_config = (path / RNG_FILE).exists(), (path / CONFIG_FILE).exists()
    return StepContent(
        weights=_load_weights(path / MODEL_FILE, device),
        optimizer=_check_mapping(
            path / OPTIMIZER_FILE, _load_tensors(path / OPTIMIZER_FILE, device)
        ),
        state=read_json(path / STATE_FILE),
        rng=cast("list[RngState]", _load_tensors(path / RNG_FILE, "cpu")) if has_rng else [],
        config=read_json(path / CONFIG_FILE) if has_config else None,
    )


def _load_weights(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    loaded = _check_mapping(path, _load_tensors(path, device))
    weights = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    if len(weights) < len(loaded):
        raise CheckpointError(f"{path} contains values that are not tensors")
    return weights


def _load_tensors(path: Path, device: str | torch.device) -> object:
    try:
        loaded: object = torch.load(path, map_location=device, weights_only=True)
        return loaded
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from error


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file of a step."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return dict(_check_mapping(path, value))


def _check_mapping(path: Path, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} contains {type(value).__name__}, expected a mapping")
    return value
