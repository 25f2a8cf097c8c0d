"""An adapter of the fake engine as files: a PEFT-like checkpoint, or a snapshot of everything.

Tables stay float64, so that what goes on from files is equal to the last bit to what never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tinkex.engine.fake.bigram import Bigram, Floats, Moments, Trainer
from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import CheckpointError, InvalidInput

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
SUMMARY_NAME = "tinkex.json"
SNAPSHOT_NAME = "snapshot.safetensors"

_LOGITS = "bigram.logits"
_FIRST, _SECOND, _GRADIENT = "first_moment", "second_moment", "gradient"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter must be like for saved weights to fit it."""

    base_model: str
    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool

    @classmethod
    def of(cls, spec: AdapterSpec) -> Self:
        """The summary of an adapter made so."""
        return cls(
            base_model=spec.base_model,
            rank=spec.rank,
            train_unembed=spec.train_unembed,
            train_mlp=spec.train_mlp,
            train_attn=spec.train_attn,
        )


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer remembers besides tables."""

    step: int
    optimizer: str
    """Its type; the tables of one are of no use to another."""


FileT = TypeVar("FileT", Summary, TrainerState)


# --- checkpoints ---------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, spec: AdapterSpec, trainer: Trainer, *, with_optimizer: bool
) -> None:
    """Write weights, what they fit, and the optimizer's memory if asked for."""
    _write_json(directory / CONFIG_NAME, _adapter_config(spec))
    _write_json(directory / SUMMARY_NAME, Summary.of(spec))
    save_file({_LOGITS: trainer.model.logits_VV}, directory / WEIGHTS_NAME)
    if with_optimizer:
        _write_json(directory / STATE_NAME, _state_of(spec, trainer))
        save_file(_moment_tables(trainer.moments), directory / OPTIMIZER_NAME)


def read_summary(directory: Path) -> Summary:
    """What saved weights fit."""
    return _read_json(directory / SUMMARY_NAME, Summary)


def read_model(directory: Path, vocab_size: int) -> Bigram:
    """Saved weights."""
    tables = _read_tables(directory / WEIGHTS_NAME, vocab_size)
    return Bigram(_need(tables, _LOGITS, directory / WEIGHTS_NAME))


def read_moments(directory: Path, spec: AdapterSpec, vocab_size: int) -> Moments:
    """The saved memory of an optimizer, which must be of the spec's type."""
    if not (directory / STATE_NAME).exists() and not (directory / OPTIMIZER_NAME).exists():
        raise InvalidInput(
            "the checkpoint has no optimizer state; load it without the optimizer, or use one "
            "that save_state wrote"
        )
    state = _read_json(directory / STATE_NAME, TrainerState)
    wanted = spec.optimizer.get("type")
    if state.optimizer != wanted:
        raise InvalidInput(
            f"the checkpoint's optimizer is {state.optimizer!r}, but the adapter trains with "
            f"{wanted!r}; load it without the optimizer"
        )
    tables = _read_tables(directory / OPTIMIZER_NAME, vocab_size)
    return Moments(state.step, tables.get(_FIRST), tables.get(_SECOND))


def check_fit(found: Summary, spec: AdapterSpec) -> None:
    """Refuse weights that were saved from an adapter made otherwise, by the first difference."""
    wanted = Summary.of(spec)
    for name in Summary.__struct_fields__:
        theirs, ours = getattr(found, name), getattr(wanted, name)
        if theirs != ours:
            raise InvalidInput(
                f"the checkpoint was saved with {name} {theirs!r}, but the adapter has {ours!r}; "
                f"create one with {name} {theirs!r} to load it"
            )


# --- snapshots -----------------------------------------------------------------------------------


def write_snapshot(directory: Path, spec: AdapterSpec, trainer: Trainer) -> None:
    """Write everything that decides what an adapter does next, the gathered gradient included."""
    tables = {_LOGITS: trainer.model.logits_VV, **_moment_tables(trainer.moments)}
    if trainer.gradient_VV is not None:
        tables[_GRADIENT] = trainer.gradient_VV
    _write_json(directory / SUMMARY_NAME, Summary.of(spec))
    _write_json(directory / STATE_NAME, _state_of(spec, trainer))
    save_file(tables, directory / SNAPSHOT_NAME)


def read_snapshot(directory: Path, spec: AdapterSpec, vocab_size: int) -> Trainer:
    """The trainer as it was; CheckpointError if the files are not those of such an adapter."""
    found, wanted = read_summary(directory), Summary.of(spec)
    if found != wanted:
        raise CheckpointError(f"the snapshot in {directory.name} is of {found}, expected {wanted}")
    state = _read_json(directory / STATE_NAME, TrainerState)
    path = directory / SNAPSHOT_NAME
    tables = _read_tables(path, vocab_size)
    moments = Moments(state.step, tables.get(_FIRST), tables.get(_SECOND))
    return Trainer(Bigram(_need(tables, _LOGITS, path)), moments, tables.get(_GRADIENT))


# --- single files --------------------------------------------------------------------------------


def _adapter_config(spec: AdapterSpec) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "r": spec.rank,
        "lora_alpha": 32,
        "target_modules": ["bigram"],
    }


def _state_of(spec: AdapterSpec, trainer: Trainer) -> TrainerState:
    return TrainerState(step=trainer.moments.num_steps, optimizer=str(spec.optimizer.get("type")))


def _moment_tables(moments: Moments) -> dict[str, Floats]:
    tables = {_FIRST: moments.first_VV, _SECOND: moments.second_VV}
    return {name: table_VV for name, table_VV in tables.items() if table_VV is not None}


def _write_json(path: Path, content: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def _read_json(path: Path, type_: type[FileT]) -> FileT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        raise CheckpointError(f"{_place(path)} is missing") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{_place(path)} cannot be read: {error}") from None


def _read_tables(path: Path, vocab_size: int) -> Mapping[str, Floats]:
    try:
        tables: dict[str, Floats] = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{_place(path)} is missing") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{_place(path)} cannot be read: {error}") from None
    shape = (vocab_size, vocab_size)
    for name, table_VV in tables.items():
        if table_VV.shape != shape or table_VV.dtype != np.float64:
            raise CheckpointError(
                f"{_place(path)}: {name} is {table_VV.dtype} of shape {table_VV.shape}, "
                f"expected float64 of shape {shape}"
            )
        if not np.isfinite(table_VV).all():
            raise CheckpointError(f"{_place(path)}: {name} has numbers that are not finite")
    return tables


def _need(tables: Mapping[str, Floats], name: str, path: Path) -> Floats:
    if name not in tables:
        raise CheckpointError(f"{_place(path)} has no table {name!r}")
    return tables[name]


def _place(path: Path) -> str:
    # The whole path is the server's own affair.
    return f"{path.parent.name}/{path.name}"
