"""The base models of an engine: all are known, some are in memory."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from tinkex.engine.config import EngineConfig
from tinkex.engine.memory_limits import can_fit, choose_evictions
from tinkex.engine.models.hub_download import Hub
from tinkex.engine.models.loading import (
    DEFAULT_CONTEXT_TOKENS,
    LoadedModel,
    compute_device,
    load_base_model,
    read_max_context_tokens,
    read_transformers_config,
)
from tinkex.engine.models.model_folder import ModelFolder, read_model_folder
from tinkex.engine.models.sources import is_folder_location, unknown_model_message
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.settings import expand_path

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _RegisteredModel:
    location: str
    folder: ModelFolder
    base_model: BaseModel
    num_bytes: int


def locate_model_folder(location: str, hub: Hub | None = None) -> ModelFolder:
    """The folder of a place, which is a folder itself or the id of a model on the hub."""
    return (
        read_model_folder(expand_path(location))
        if is_folder_location(location)
        else (hub or Hub()).find(location)
    )


def describe_base_model(name: str, location: str, folder: ModelFolder) -> BaseModel:
    """What clients are told about a model."""
    architecture = read_transformers_config(folder)
    context = read_max_context_tokens(architecture) or folder.max_context_tokens
    if context is None:
        context = DEFAULT_CONTEXT_TOKENS
        LOG.warning("base model %r names no longest context; it is taken as %d", name, context)
    return BaseModel(
        name=name,
        max_context_tokens=context,
        arch=folder.arch or folder.model_type,
        vocab_size=int(getattr(architecture.get_text_config(), "vocab_size", 0) or 0),
        tokenizer_id=None if is_folder_location(location) else location,
        tokenizer_folder=str(folder.path) if folder.has_tokenizer else None,
    )


class ModelRegistry:
    """Base models by name; one that is needed is loaded, and those longest unused make room."""

    def __init__(
        self,
        sources: Mapping[str, str],
        config: EngineConfig,
        is_busy: Callable[[str], bool] = lambda name: False,
        on_evict: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`on_evict` has to let go of everything that holds the model of a name."""
        self._config = config
        self._is_busy = is_busy
        self._on_evict = on_evict
        compute_device(config)
        self._registered = {name: self._inspect(name, place) for name, place in sources.items()}
        self._removed: dict[str, _RegisteredModel] = {}
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()

    def _inspect(self, name: str, location: str) -> _RegisteredModel:
        try:
            folder = locate_model_folder(location)
            described = describe_base_model(name, location, folder)
        except UnusableModel as error:
            raise UnusableModel(f"base model {name!r}: {error.message}", hint=error.hint) from error
        num_bytes, budget = folder.num_bytes(self._config.dtype), self._config.memory_bytes
        if not can_fit(num_bytes, budget, {}, ()):
            raise UnusableModel(
                f"base model {name!r} takes {num_bytes:,} bytes as {self._config.dtype}, and "
                f"memory_bytes allows {budget:,} for all",
                hint="Allow more memory, use a smaller dtype, or leave the model out.",
            )
        return _RegisteredModel(location, folder, described, num_bytes)

    def replace_sources(self, sources: Mapping[str, str], in_use: Collection[str] = ()) -> None:
        """Serve these models from now on.

        One that cannot be used is left out. One that is removed is unloaded unless it is in use,
        and still serves the runs that began on it.
        """
        before = self._removed | self._registered
        now: dict[str, _RegisteredModel] = {}
        for name, place in sources.items():
            known = before.get(name)
            if known is None or (known.location != place and name not in in_use):
                known = self._inspect_or_skip(name, place)
            elif known.location != place:
                LOG.warning("base model %r is in use: it moves to %s at a restart", name, place)
            if known is not None:
                now[name] = known
        for name in before:
            if now.get(name) is not before[name] and name not in in_use:
                self._unload(name)
        self._registered, self._removed = now, {name: before[name] for name in before.keys() - now}

    def _inspect_or_skip(self, name: str, location: str) -> _RegisteredModel | None:
        try:
            return self._inspect(name, location)
        except UnusableModel as error:
            LOG.warning("%s; it is left out", error.message)
            return None

    def base_models(self) -> list[BaseModel]:
        """Everything that is served."""
        return [known.base_model for known in self._registered.values()]

    @property
    def loaded_names(self) -> tuple[str, ...]:
        """The models in memory, longest unused first."""
        return tuple(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """A model, loaded now if it is not in memory; that takes as long as its disk does."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        known = self._get_registered(name)
        self._evict_for(name, known.num_bytes)
        found = load_base_model(
            name, known.folder, self._config, known.base_model.max_context_tokens
        )
        self._loaded[name] = found
        return found

    def can_load(self, name: str) -> bool:
        """Whether `get` keeps to the budget now, which it does not while too many are busy."""
        if name in self._loaded:
            return True
        sizes = self._loaded_bytes()
        needed = self._get_registered(name).num_bytes
        return can_fit(needed, self._config.memory_bytes, sizes, self._busy_names())

    def close(self) -> None:
        """Let go of all models."""
        self._loaded.clear()

    def _get_registered(self, name: str) -> _RegisteredModel:
        known = self._registered.get(name) or self._removed.get(name)
        if known is None:
            raise InvalidInput(unknown_model_message(name, self._registered))
        return known

    def _evict_for(self, name: str, needed_bytes: int) -> None:
        budget = self._config.memory_bytes
        for doomed in choose_evictions(
            needed_bytes, budget, self._loaded_bytes(), self._busy_names()
        ):
            LOG.info("base model %r makes room for %r", doomed, name)
            self._unload(doomed)
        held = sum(self._loaded_bytes().values())
        if not can_fit(needed_bytes, budget, self._loaded_bytes(), self._loaded):
            LOG.warning(
                "base model %r takes %d bytes beside %d of models that are busy: more than the %d "
                "of memory_bytes",
                *(name, needed_bytes, held, budget),
            )

    def _unload(self, name: str) -> None:
        """Free the memory of a model; one that is not loaded is not an error."""
        if name not in self._loaded:
            return
        self._on_evict(name)
        del self._loaded[name]
        # Modules and their tensors refer to each other.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _loaded_bytes(self) -> dict[str, int]:
        return {name: found.num_bytes for name, found in self._loaded.items()}

    def _busy_names(self) -> set[str]:
        return {name for name in self._loaded if self._is_busy(name)}
