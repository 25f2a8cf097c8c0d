"""A model folder becomes a model that computes: weights, end tokens, and a way to read its text."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_log

from tinkex.engine.config import EngineConfig
from tinkex.engine.models.model_folder import CONTEXT_LENGTH_KEYS, ModelFolder
from tinkex.engine.models.weight_files import UnusableModel, read_json
from tinkex.errors import ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.nn.hosted_model import HostedModel, max_positions
from tinkex.text import Tokenizer, load_tokenizer

LOG = get_logger(__name__)
LOG_INTERVAL_SECONDS = 2.0
#: How long a context may be if the model does not say.
DEFAULT_CONTEXT_TOKENS = 2048
Decode: TypeAlias = Callable[[Sequence[int]], str]
#: What transformers and torch raise about a model that they cannot build or fill.
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
    """Tokens that end a text."""
    max_context_tokens: int
    num_bytes: int
    """Memory that its weights take."""
    tokenizer: Tokenizer | None
    """What knows the text of tokens; None if there is no tokenizer."""

    @property
    def decode(self) -> Decode | None:
        """The text of some tokens, special ones included; None if there is no tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """What base models compute with."""
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def compute_device(config: EngineConfig) -> torch.device:
    """Where base models compute; raises if there is no such device here."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device is {config.device!r}, which cannot be used here: {reason}",
            hint="Use auto or cpu, or install a build of torch that knows the device.",
        ) from error
    return device


def read_transformers_config(folder: ModelFolder) -> Any:
    """The config of a folder as transformers reads it; raises for a kind it cannot run."""
    try:
        config = AutoConfig.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except _LOAD_ERRORS as error:
        raise UnusableModel(
            f"{folder.path} holds a {folder.model_type!r} model, which transformers cannot run "
            "without code from elsewhere; such code is never run here"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnusableModel(
            f"{folder.path} holds a {folder.model_type!r} model, which is no causal language model"
        )
    return config


def read_max_context_tokens(config: Any) -> int | None:
    """The most tokens that a model can read and write together, if its config says so."""
    text = config.get_text_config()
    found = (getattr(part, name, None) for part in (text, config) for name in CONTEXT_LENGTH_KEYS)
    told = next((int(number) for number in found if isinstance(number, int) and number > 0), None)
    limit = max_positions(text)
    return told if limit is None else min(limit, told or limit)


def load_base_model(
    name: str, folder: ModelFolder, config: EngineConfig, max_context_tokens: int
) -> LoadedModel:
    """Load a model; what is in the way becomes one sentence."""
    started = time.monotonic()
    device = compute_device(config)
    LOG.info("base model %r is loaded from %s", name, folder.path)
    try:
        with _log_progress(name):
            model = _load_weights(folder, compute_dtype(config))
        num_bytes = _copy_weights(name, model)
        host = HostedModel(_move_to_device(model, device), packed_bytes=config.packed_bytes)
    except pickle.UnpicklingError as error:
        raise UnusableModel(
            f"base model {name!r} cannot be loaded: a pickle in {folder.path} holds more than "
            "tensors, and nothing in it is run"
        ) from error
    except (*_LOAD_ERRORS, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnusableModel(f"base model {name!r} cannot be loaded: {reason}") from error
    tokenizer = _load_tokenizer(name, folder)
    LOG.info(
        "base model %r is ready: %.2f GB as %s on %s, after %.1f s",
        *(name, num_bytes / 1e9, config.dtype, device, time.monotonic() - started),
    )
    return LoadedModel(
        name=name,
        hosted_model=host,
        eos_tokens=_eos_tokens(folder, host.config, tokenizer),
        max_context_tokens=max_context_tokens,
        num_bytes=num_bytes,
        tokenizer=tokenizer,
    )


# --- weights --------------------------------------------------------------------------------


def _load_weights(folder: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
    # With the report its type is another than what it says.
    made: Any = AutoModelForCausalLM.from_pretrained(
        folder.path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        # A pickle may hold tensors and nothing that runs.
        weights_only=True,
        output_loading_info=True,
        # It is refused below, with a name.
        ignore_mismatched_sizes=True,
    )
    model, report = made
    # transformers would go on with random numbers in their place.
    for problem in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(_tensor_name, report[problem])):
            verb = "are missing" if problem == "missing_keys" else "have another shape"
            raise ValueError(f"{len(found)} tensors {verb} in {folder.path}, such as {found[0]}")
    assert isinstance(model, PreTrainedModel)
    return model


def _tensor_name(key: str | tuple[Any, ...]) -> str:
    # A tensor of another shape comes with both shapes.
    return key if isinstance(key, str) else str(key[0])


def _copy_weights(name: str, model: PreTrainedModel) -> int:
    """Give the model memory of its own, and count it.

    What was read may be a view of the file itself: it would change with the file, end this process
    if the file is cut, and lie where wide instructions are slow. Its disk is read only now.
    """
    tensors = [*model.parameters(), *model.buffers()]
    total, done, tell_at = sum(tensor.nbytes for tensor in tensors), 0, _next_log_time()
    for tensor in tensors:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        done += tensor.nbytes
        if time.monotonic() >= tell_at:
            tell_at = _next_log_time()
            LOG.info("base model %r: %.0f%% is in memory", name, 100 * done / total)
    return total


def _next_log_time() -> float:
    return time.monotonic() + LOG_INTERVAL_SECONDS


def _move_to_device(model: Any, device: torch.device) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(device)
    return moved


@contextmanager
def _log_progress(name: str) -> Iterator[None]:
    """Say every now and then how far the loading is; transformers' own bars stay away."""
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()

    def watched(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items = args[0] if args else None
        return _log_iteration(name, items) if hasattr(items, "__len__") else make(*args, **options)

    before = transformers_log.set_tqdm_hook(watched)
    try:
        yield
    finally:
        transformers_log.set_tqdm_hook(before)


def _log_iteration(name: str, items: Any) -> Iterator[Any]:
    tell_at = _next_log_time()
    for number, item in enumerate(items):
        yield item
        if time.monotonic() >= tell_at:
            tell_at = _next_log_time()
            LOG.info("base model %r: %.0f%% is read", name, 100 * (number + 1) / len(items))


# --- text -----------------------------------------------------------------------------------


def _load_tokenizer(name: str, folder: ModelFolder) -> Tokenizer | None:
    if not folder.has_tokenizer:
        return None
    try:
        return load_tokenizer(str(folder.path))
    except InvalidInput as error:
        LOG.warning("base model %r cannot have stop strings: %s", name, error.message)
        return None


def _eos_tokens(folder: ModelFolder, config: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, from everywhere that names some."""
    path = folder.path / "generation_config.json"
    named = [
        read_json(path).get("eos_token_id") if path.is_file() else None,
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    lists = [found if isinstance(found, list) else [found] for found in named]
    return frozenset(token for found in lists for token in found if isinstance(token, int))
