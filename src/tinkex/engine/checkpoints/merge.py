"""Merges an adapter into its base model, and writes a self-contained model folder.

Weights are streamed in chunks, so that memory use does not depend on the model size. Folders whose
files do not allow that are loaded as a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_log

from tinkex.engine.checkpoints.merge_plan import (
    DeltaSource,
    MergePlan,
    OutputTensor,
    WeightDelta,
    find_tied_weights,
    plan_merge,
    read_deltas,
    split_parameter,
)
from tinkex.engine.checkpoints.metadata import write_json
from tinkex.engine.checkpoints.safetensors_io import (
    DTYPE_CODES,
    SafetensorsFile,
    dtype_bytes,
    max_abs,
    open_tensor_writer,
    open_tensors,
)
from tinkex.engine.config import DTYPES
from tinkex.engine.models.loading import read_transformers_config
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.models.weight_files import SAFETENSORS, UnusableModel, read_json
from tinkex.errors import InvalidInput
from tinkex.system.atomic import new_directory

#: The number of elements in memory at a time.
CHUNK_NUMBERS = 16 << 20
_DTYPE_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}
#: Suffixes of weight files in any format, which are not copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX_SUFFIX = ".index.json"


class MergeProgress(NamedTuple):
    """The progress of a merge."""

    done_bytes: int
    total_bytes: int


OnMergeProgress: TypeAlias = Callable[[MergeProgress], None]


def merge_adapter(
    base_folder: Path,
    adapter_folder: Path,
    out_folder: Path,
    *,
    dtype: str | None = None,
    progress: OnMergeProgress = lambda _: None,
) -> None:
    """Write W + scale B A for every adapted weight, and copies of all others.

    The folder is written atomically and can be loaded with `AutoModelForCausalLM.from_pretrained`.
    `dtype` is the dtype to save; None keeps that of the base model. Raises InvalidInput if the
    adapter does not match, ConfigError if the base model cannot be used.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInput(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if out_folder.exists():
        raise InvalidInput(f"{out_folder} exists already; give a folder that does not exist")
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    config = read_transformers_config(read_model_folder(base_folder))
    with _silence_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    deltas = read_deltas(adapter_folder, model)
    code = DTYPE_CODES[torch_dtype] if torch_dtype else None
    plan = plan_merge(base_folder, model, deltas, code)
    with new_directory(out_folder) as scratch:
        if plan is None:
            _merge_in_memory(base_folder, scratch, model, deltas, torch_dtype)
            progress(MergeProgress(1, 1))
        else:
            _StreamingMerge(plan, deltas, model, progress).run(base_folder, scratch)
            _write_config(base_folder, scratch, dtype, is_untied=plan.is_untied)
        _copy_other_files(base_folder, scratch)


# --- streaming -----------------------------------------------------------------------------------


class _StreamingMerge:
    """Writes the files of a merged model one after another."""

    def __init__(
        self,
        plan: MergePlan,
        deltas: Mapping[str, WeightDelta],
        model: PreTrainedModel,
        progress: OnMergeProgress,
    ) -> None:
        self._plan = plan
        self._deltas = deltas
        self._model = model
        self._progress = progress
        self._total_bytes = sum(tensor.spec.num_bytes for tensor in plan.tensors)
        self._done_bytes = 0
        self._split_delta: dict[str, Tensor] = {}
        """The delta of the current parameter that is stored in several tensors."""

    def run(self, base_folder: Path, out_folder: Path) -> None:
        """Write every file, and an index if there are several."""
        for file_name in self._plan.files:
            tensors = [tensor for tensor in self._plan.tensors if tensor.file_name == file_name]
            specs = [tensor.spec for tensor in tensors]
            with (
                open_tensors(base_folder / file_name) as file,
                open_tensor_writer(out_folder / file_name, specs) as write,
            ):
                for tensor in tensors:
                    self._write_tensor(file, tensor, write)
        if self._plan.files != [SAFETENSORS[0]]:
            weight_map = {tensor.spec.name: tensor.file_name for tensor in self._plan.tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            write_json(out_folder / SAFETENSORS[1], index)

    def _write_tensor(
        self, file: SafetensorsFile, tensor: OutputTensor, write: Callable[[Tensor], None]
    ) -> None:
        dtype = _DTYPE_BY_CODE.get(tensor.spec.code)
        for start, stop in _row_chunks(tensor.spec.shape):
            chunk = _read_rows(file, tensor, start, stop)
            if tensor.source is not None:
                assert dtype is not None  # adapted weights are floats
                chunk = _add_delta(
                    chunk, self._delta_rows(tensor.source, start, stop), dtype, tensor.spec.name
                )
            write(chunk if dtype is None else chunk.to(dtype))
            self._done_bytes += chunk.numel() * dtype_bytes(tensor.spec.code)
            self._progress(MergeProgress(self._done_bytes, self._total_bytes))

    def _delta_rows(self, source: DeltaSource, start: int, stop: int) -> Tensor:
        delta = self._deltas[source.parameter]
        if source.part is None:
            return delta.rows(start, stop)
        if source.part not in self._split_delta:
            whole = delta.rows(0, delta.shape[0])
            self._split_delta = split_parameter(self._model, source.parameter, whole)
        return self._split_delta[source.part][start:stop]


def _row_chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis with at most CHUNK_NUMBERS elements."""
    num_rows = shape[0] if shape else 1
    step = max(1, CHUNK_NUMBERS // max(1, prod(shape[1:])))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _read_rows(file: SafetensorsFile, tensor: OutputTensor, start: int, stop: int) -> Tensor:
    if not tensor.spec.shape:
        whole: Tensor = file.get_tensor(tensor.stored_name)
        return whole
    rows: Tensor = file.get_slice(tensor.stored_name)[start:stop]
    return rows


def _add_delta(weight: Tensor, delta: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Add in at least float32, and round once."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = weight.to(wide) + delta
    if not max_abs(total) <= torch.finfo(dtype).max:
        raise InvalidInput(
            f"the merged {name} has values that {dtype} cannot represent; merge with dtype float32"
        )
    return total.to(dtype)


def _write_config(base_folder: Path, out: Path, dtype: str | None, *, is_untied: bool) -> None:
    config = read_json(base_folder / "config.json")
    inner = config.get("text_config")
    for part in (config, *([inner] if isinstance(inner, dict) else [])):
        if is_untied:
            part["tie_word_embeddings"] = False
        for name in ("dtype", "torch_dtype"):
            if dtype is not None and name in part:
                part[name] = dtype
    if dtype is not None:
        config["dtype"] = dtype
    write_json(out / "config.json", config)


def _copy_other_files(base_folder: Path, out: Path) -> None:
    """Copy the tokenizer and all other files that are not weights."""
    for path in base_folder.iterdir():
        is_weights = path.name.endswith((*_WEIGHT_SUFFIXES, _INDEX_SUFFIX))
        is_wanted = path.is_file() and not is_weights and not path.name.startswith(".")
        if is_wanted and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


# --- in memory -----------------------------------------------------------------------------------


@torch.no_grad()
def _merge_in_memory(
    base_folder: Path,
    out: Path,
    skeleton: PreTrainedModel,
    deltas: Mapping[str, WeightDelta],
    dtype: torch.dtype | None,
) -> None:
    tie, config = find_tied_weights(skeleton), skeleton.config
    untied = tie if tie is not None and tie.head in deltas else None
    if untied is not None:
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    with _silence_transformers():
        model = _load_base_model(base_folder, config, {untied.head} if untied else set())
        if untied is not None:
            # A copy, because the loaded weights may still be shared.
            weight = model.get_parameter(untied.embedding).clone()
            model.get_output_embeddings().weight = nn.Parameter(weight, requires_grad=False)
        for name, delta in deltas.items():
            weight = model.get_parameter(name)
            for start, stop in _row_chunks(weight.shape):
                rows = weight[start:stop]
                rows.copy_(_add_delta(rows, delta.rows(start, stop), dtype or rows.dtype, name))
        if dtype is not None:
            nn.Module.to(model, dtype)
        model.save_pretrained(out)


def _load_base_model(
    base_folder: Path, config: PreTrainedConfig, expected_missing: set[str]
) -> PreTrainedModel:
    loaded: object = AutoModelForCausalLM.from_pretrained(
        base_folder,
        config=config,
        dtype="auto",
        local_files_only=True,
        trust_remote_code=False,
        weights_only=True,
        output_loading_info=True,
    )
    assert isinstance(loaded, tuple)
    model, report = loaded
    missing = {
        *map(str, report["missing_keys"]),
        *map(str, report["mismatched_keys"]),
    } - expected_missing
    if missing:
        raise UnusableModel(f"{base_folder} has no weights for {min(missing)!r}")
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers about expected conditions."""
    verbosity, had_progress_bar = (
        transformers_log.get_verbosity(),
        transformers_log.is_progress_bar_enabled(),
    )
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        transformers_log.set_verbosity(verbosity)
        if had_progress_bar:
            transformers_log.enable_progress_bar()
