"""Reads and writes checkpoints (PEFT-like) and snapshots of the fake engine.

Tables stay float64, so that a restored adapter is bit-identical to the saved one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tinkex.engine.checkpoints.metadata import (
    CONFIG_NAME,
    METADATA_NAME,
    OPTIMIZER_NAME,
    SNAPSHOT_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    AdapterMetadata,
    TrainerState,
    read_metadata,
    read_struct,
    read_trainer_state,
    short_path,
    write_json,
)
from tinkex.engine.fake.bigram import Bigram, BigramTrainer, Floats, Moments
from tinkex.engine.models.weight_files import describe_header_problem
from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import CheckpointError

_LOGITS = "bigram.logits"
#: The one module of a bigram model.
MODULE_NAME = "bigram"
_FIRST, _SECOND, _GRADIENT = "first_moment", "second_moment", "gradient"


# --- checkpoints ---------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, spec: AdapterSpec, trainer: BigramTrainer, *, with_optimizer: bool
) -> None:
    """Write weights, metadata and optionally the optimizer state."""
    write_json(directory / CONFIG_NAME, _adapter_config(spec))
    write_json(directory / METADATA_NAME, AdapterMetadata.from_spec(spec))
    save_file({_LOGITS: trainer.model.logits_VV}, directory / WEIGHTS_NAME)
    if with_optimizer:
        write_json(directory / STATE_NAME, TrainerState.from_spec(spec, trainer.moments.num_steps))
        save_file(_moment_tables(trainer.moments), directory / OPTIMIZER_NAME)


def read_model(directory: Path, vocab_size: int) -> Bigram:
    """Read saved weights."""
    tables = _read_tables(directory / WEIGHTS_NAME, vocab_size)
    return Bigram(_require_table(tables, _LOGITS, directory / WEIGHTS_NAME))


def read_moments(directory: Path, spec: AdapterSpec, vocab_size: int) -> Moments:
    """Read a saved optimizer state, which must be of the spec's type."""
    state = read_trainer_state(directory, spec)
    tables = _read_tables(directory / OPTIMIZER_NAME, vocab_size)
    return Moments(state.num_steps, tables.get(_FIRST), tables.get(_SECOND))


# --- snapshots -----------------------------------------------------------------------------------


def write_snapshot(directory: Path, spec: AdapterSpec, trainer: BigramTrainer) -> None:
    """Write the complete state of an adapter, including the accumulated gradient."""
    tables = {_LOGITS: trainer.model.logits_VV, **_moment_tables(trainer.moments)}
    if trainer.gradient_VV is not None:
        tables[_GRADIENT] = trainer.gradient_VV
    write_json(directory / METADATA_NAME, AdapterMetadata.from_spec(spec))
    write_json(directory / STATE_NAME, TrainerState.from_spec(spec, trainer.moments.num_steps))
    save_file(tables, directory / SNAPSHOT_NAME)


def read_snapshot(directory: Path, spec: AdapterSpec, vocab_size: int) -> BigramTrainer:
    """Read a snapshot; raises CheckpointError if it is not of such an adapter."""
    metadata, expected = read_metadata(directory), AdapterMetadata.from_spec(spec)
    if metadata != expected:
        raise CheckpointError(
            f"the snapshot in {directory.name} is of {metadata}, expected {expected}"
        )
    state = read_struct(directory / STATE_NAME, TrainerState)
    path = directory / SNAPSHOT_NAME
    tables = _read_tables(path, vocab_size)
    moments = Moments(state.num_steps, tables.get(_FIRST), tables.get(_SECOND))
    return BigramTrainer(
        Bigram(_require_table(tables, _LOGITS, path)), moments, tables.get(_GRADIENT)
    )


# --- tables --------------------------------------------------------------------------------------


def _adapter_config(spec: AdapterSpec) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "use_rslora": spec.use_rslora,
        "target_modules": [MODULE_NAME],
    }


def _moment_tables(moments: Moments) -> dict[str, Floats]:
    tables = {_FIRST: moments.first_VV, _SECOND: moments.second_VV}
    return {name: table_VV for name, table_VV in tables.items() if table_VV is not None}


def _read_tables(path: Path, vocab_size: int) -> Mapping[str, Floats]:
    try:
        tables: dict[str, Floats] = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{short_path(path)} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{short_path(path)} cannot be read: {error}") from error
    except (SafetensorError, KeyError, TypeError) as error:
        # KeyError and TypeError: a dtype that NumPy does not support.
        reason = describe_header_problem(path) or error
        raise CheckpointError(f"{short_path(path)} cannot be read: {reason}") from None
    shape = (vocab_size, vocab_size)
    for name, table_VV in tables.items():
        if table_VV.shape != shape or table_VV.dtype != np.float64:
            raise CheckpointError(
                f"{short_path(path)}: {name} is {table_VV.dtype} of shape {table_VV.shape}, "
                f"expected float64 of shape {shape}"
            )
        if not np.isfinite(table_VV).all():
            raise CheckpointError(f"{short_path(path)}: {name} has non-finite values")
    return tables


def _require_table(tables: Mapping[str, Floats], name: str, path: Path) -> Floats:
    if name not in tables:
        raise CheckpointError(f"{short_path(path)} has no table {name!r}")
    return tables[name]
