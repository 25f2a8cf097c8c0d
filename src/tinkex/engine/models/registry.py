"""Registry of the base models of an engine; loads them on demand and evicts unused ones."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tinkex.engine.models.loading import HostModel

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _RegisteredModel:
    location: str
    folder: ModelFolder
    base_model: BaseModel
    num_bytes: int


def locate_model_folder(location: str, hub: Hub | None = None) -> ModelFolder:
    """Return the folder of a location, which is a path or a model id of the Hub."""
    return (
        read_model_folder(expand_path(location))
        if is_folder_location(location)
        else (hub or Hub()).find(location)
    )


def describe_base_model(name: str, location: str, folder: ModelFolder) -> BaseModel:
    """Describe a model for clients."""
    architecture = read_transformers_config(folder)
    context = read_max_context_tokens(architecture) or folder.max_context_tokens
    if context is None:
        context = DEFAULT_CONTEXT_TOKENS
        LOG.warning("base model %r gives no context length; using %d", name, context)
    return BaseModel(
        name=name,
        max_context_tokens=context,
        arch=folder.arch or folder.model_type,
        vocab_size=int(getattr(architecture.get_text_config(), "vocab_size", 0) or 0),
        tokenizer_id=None if is_folder_location(location) else location,
        tokenizer_folder=str(folder.path) if folder.has_tokenizer else None,
    )


class ModelRegistry:
    """Base models by name: loaded when needed; least recently used ones are evicted."""

    def __init__(
        self,
        sources: Mapping[str, str],
        config: EngineConfig,
        is_busy: Callable[[str], bool] = lambda name: False,
        on_evict: Callable[[str], None] = lambda name: None,
        host: HostModel | None = None,
    ) -> None:
        """`on_evict` must release all references to the model of a name."""
        self._host = host
        self._config = config
        self._is_busy = is_busy
        self._on_evict = on_evict
        compute_device(config)
        self._registered = {
            name: self._inspect(name, location) for name, location in sources.items()
        }
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
                f"base model {name!r} needs {num_bytes:,} bytes as {self._config.dtype}, but "
                f"memory_bytes allows {budget:,} for all models",
                hint="Allow more memory, use a smaller dtype, or leave the model out.",
            )
        return _RegisteredModel(location, folder, described, num_bytes)

    def replace_sources(self, sources: Mapping[str, str], in_use: Collection[str] = ()) -> None:
        """Serve these models from now on; unusable ones are skipped.

        A removed model is unloaded unless it is in use, and still serves existing runs.
        """
        before = self._removed | self._registered
        now: dict[str, _RegisteredModel] = {}
        for name, location in sources.items():
            known = before.get(name)
            if known is None or (known.location != location and name not in in_use):
                known = self._inspect_or_skip(name, location)
            elif known.location != location:
                LOG.warning("base model %r is in use: %s applies after a restart", name, location)
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
            LOG.warning("%s; skipping it", error.message)
            return None

    def base_models(self) -> list[BaseModel]:
        """All served models."""
        return [known.base_model for known in self._registered.values()]

    @property
    def loaded_names(self) -> tuple[str, ...]:
        """The models in memory, least recently used first."""
        return tuple(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """Return a model; loads it if it is not in memory."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        known = self._get_registered(name)
        self._evict_for(name, known.num_bytes)
        loaded = load_base_model(
            name, known.folder, self._config, known.base_model.max_context_tokens, self._host
        )
        self._loaded[name] = loaded
        return loaded

    def close(self) -> None:
        """Unload all models."""
        self._loaded.clear()

    def _get_registered(self, name: str) -> _RegisteredModel:
        known = self._registered.get(name) or self._removed.get(name)
        if known is None:
            raise InvalidInput(unknown_model_message(name, self._registered))
        return known

    def _evict_for(self, name: str, needed_bytes: int) -> None:
        budget = self._config.memory_bytes
        for evicted in choose_evictions(
            needed_bytes, budget, self._loaded_bytes(), self._busy_names()
        ):
            LOG.info("evicting base model %r to load %r", evicted, name)
            self._unload(evicted)
        used = sum(self._loaded_bytes().values())
        if not can_fit(needed_bytes, budget, self._loaded_bytes(), self._loaded):
            LOG.warning(
                "base model %r needs %d bytes in addition to the %d of busy models: more than "
                "memory_bytes, which is %d",
                *(name, needed_bytes, used, budget),
            )

    def _unload(self, name: str) -> None:
        """Free the memory of a model; does nothing if it is not loaded."""
        if name not in self._loaded:
            return
        self._on_evict(name)
        del self._loaded[name]
        # Modules and tensors form reference cycles.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _loaded_bytes(self) -> dict[str, int]:
        return {name: model.num_bytes for name, model in self._loaded.items()}

    def _busy_names(self) -> set[str]:
        return {name for name in self._loaded if self._is_busy(name)}
