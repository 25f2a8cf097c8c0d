"""Loads a model folder into memory: weights, EOS tokens and tokenizer."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_log

from tinkex.engine.config import EngineConfig
from tinkex.engine.models.model_folder import CONTEXT_LENGTH_KEYS, ModelFolder
from tinkex.engine.models.weight_files import UnusableModel, error_reason, read_json
from tinkex.errors import ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.nn.ops.rotary import max_positions
from tinkex.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from tinkex.nn.hosted_model import HostedModel

    HostModel: TypeAlias = Callable[[str, PreTrainedModel], HostedModel]
    """Hosts a model by name, instead of on one device."""

LOG = get_logger(__name__)
Item = TypeVar("Item")
LOG_INTERVAL_SECONDS = 2.0
#: The context length if the config does not give one.
DEFAULT_CONTEXT_TOKENS = 2048
#: What transformers and torch raise for a model that they cannot build or load.
_LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, ImportError),
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A base model in memory."""

    name: str
    hosted_model: HostedModel
    eos_tokens: frozenset[int]
    """Tokens that end a sequence."""
    max_context_tokens: int
    num_bytes: int
    """The memory of its weights."""
    tokenizer: Tokenizer | None
    """None if the folder has no tokenizer."""


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype that base models compute with."""
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def compute_device(config: EngineConfig) -> torch.device:
    """The device that base models compute on; raises ConfigError if it is not available."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device is {config.device!r}, which cannot be used: {reason}",
            hint="Use auto or cpu, or install a build of torch that supports the device.",
        ) from error
    return device


def read_transformers_config(folder: ModelFolder) -> PreTrainedConfig:
    """Read a folder's config with transformers; raises UnusableModel if it cannot run it."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except _LOAD_ERRORS as error:
        raise UnusableModel(
            f"{folder.path} holds a {folder.model_type!r} model, which transformers cannot run "
            "without remote code; tinkex never runs remote code"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnusableModel(
            f"{folder.path} holds a {folder.model_type!r} model, which is not a causal language "
            "model"
        )
    return config


def read_max_context_tokens(config: PreTrainedConfig) -> int | None:
    """The context length that a config gives; None if it gives none."""
    text = config.get_text_config()
    values = (getattr(part, name, None) for part in (text, config) for name in CONTEXT_LENGTH_KEYS)
    declared = next((int(n) for n in values if isinstance(n, int) and n > 0), None)
    limit = max_positions(text)
    return declared if limit is None else min(limit, declared or limit)


def load_base_model(
    name: str,
    folder: ModelFolder,
    config: EngineConfig,
    max_context_tokens: int,
    host: HostModel | None = None,
) -> LoadedModel:
    """Load a model; raises UnusableModel with a one-line reason if that fails."""
    # Imports the model classes of transformers, which takes seconds: only once a model is needed.
    from tinkex.nn.hosted_model import HostedModel  # noqa: PLC0415

    started = time.monotonic()
    device = compute_device(config)
    LOG.info("loading base model %r from %s", name, folder.path)
    try:
        with _log_progress(name):
            model = _load_weights(folder, compute_dtype(config))
        num_bytes = _copy_weights(name, model)
        if host is not None:
            hosted_model = host(name, model)
        else:
            torch.nn.Module.to(model, device)
            hosted_model = HostedModel(model, packed_bytes=config.packed_bytes)
            num_bytes = hosted_model.num_bytes
    except pickle.UnpicklingError as error:
        raise UnusableModel(
            f"base model {name!r} cannot be loaded: a pickle in {folder.path} holds more than "
            "tensors; code in pickles is never run"
        ) from error
    except (*_LOAD_ERRORS, MemoryError) as error:
        raise UnusableModel(
            f"base model {name!r} cannot be loaded: {error_reason(error)}"
        ) from error
    tokenizer = _load_tokenizer(name, folder)
    LOG.info(
        "base model %r is ready: %.2f GB as %s on %s, after %.1f s",
        *(name, num_bytes / 1e9, config.dtype, device, time.monotonic() - started),
    )
    return LoadedModel(
        name=name,
        hosted_model=hosted_model,
        eos_tokens=_eos_tokens(folder, hosted_model.config, tokenizer),
        max_context_tokens=max_context_tokens,
        num_bytes=num_bytes,
        tokenizer=tokenizer,
    )


# --- weights --------------------------------------------------------------------------------


def _load_weights(folder: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
    # The annotated return type ignores output_loading_info.
    loaded: object = AutoModelForCausalLM.from_pretrained(
        folder.path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        # Pickles may hold tensors, but no code.
        weights_only=True,
        output_loading_info=True,
        # Reported below, with the tensor's name.
        ignore_mismatched_sizes=True,
    )
    assert isinstance(loaded, tuple)
    model: PreTrainedModel = loaded[0]
    report: Mapping[str, Iterable[str | tuple[object, ...]]] = loaded[1]
    # transformers would use random values in their place.
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(_tensor_name, report[problem])):
            verb = "are missing" if problem == "missing_keys" else "have the wrong shape"
            raise ValueError(
                f"{len(names)} tensors {verb} in {folder.path}, for example {names[0]}"
            )
    return model


def _tensor_name(key: str | tuple[object, ...]) -> str:
    # A mismatched tensor is reported with both shapes.
    return key if isinstance(key, str) else str(key[0])


def _copy_weights(name: str, model: PreTrainedModel) -> int:
    """Copy all tensors to private memory, and return their size in bytes.

    Loaded tensors may be views of the memory-mapped file: they would change with the file, crash
    this process if it is truncated, and may be poorly aligned. The copy is what reads the disk.
    """
    tensors = [*model.parameters(), *model.buffers()]
    total, done, log_at = sum(tensor.nbytes for tensor in tensors), 0, _next_log_time()
    for tensor in tensors:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        done += tensor.nbytes
        if time.monotonic() >= log_at:
            log_at = _next_log_time()
            LOG.info("base model %r: %.0f%% copied to memory", name, 100 * done / total)
    return total


def _next_log_time() -> float:
    return time.monotonic() + LOG_INTERVAL_SECONDS


@contextmanager
def _log_progress(name: str) -> Iterator[None]:
    """Log the loading progress periodically instead of showing progress bars."""
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()

    def log_instead(
        make: Callable[..., object], args: tuple[object, ...], options: dict[str, object]
    ) -> object:
        items = args[0] if args else None
        if isinstance(items, Collection):
            return _log_iteration(name, items)
        return make(*args, **options)

    before = transformers_log.set_tqdm_hook(log_instead)
    try:
        yield
    finally:
        transformers_log.set_tqdm_hook(before)


def _log_iteration(name: str, items: Collection[Item]) -> Iterator[Item]:
    log_at = _next_log_time()
    for number, item in enumerate(items):
        yield item
        if time.monotonic() >= log_at:
            log_at = _next_log_time()
            LOG.info("base model %r: %.0f%% read", name, 100 * (number + 1) / len(items))


# --- tokenizer ------------------------------------------------------------------------------


def _load_tokenizer(name: str, folder: ModelFolder) -> Tokenizer | None:
    if not folder.has_tokenizer:
        return None
    try:
        return load_tokenizer(str(folder.path))
    except InvalidInput as error:
        LOG.warning("base model %r does not support stop strings: %s", name, error.message)
        return None


def _eos_tokens(
    folder: ModelFolder, config: PreTrainedConfig, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """The EOS tokens of generation config, model config and tokenizer."""
    path = folder.path / "generation_config.json"
    sources = [
        read_json(path).get("eos_token_id") if path.is_file() else None,
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    lists = [ids if isinstance(ids, list) else [ids] for ids in sources]
    return frozenset(token for ids in lists for token in ids if isinstance(token, int))
