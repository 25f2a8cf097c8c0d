"""The base models of an engine: all are known, some are in memory."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from tinkex.engine.config import EngineConfig
from tinkex.engine.models.folders import Folder, read_folder
from tinkex.engine.models.hub import Hub
from tinkex.engine.models.loading import (
    DEFAULT_CONTEXT_TOKENS,
    Loaded,
    compute_device,
    context_of,
    load,
    read_architecture,
)
from tinkex.engine.models.room import fits, to_evict
from tinkex.engine.models.sources import is_folder, unknown_model
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.settings import expanded

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    place: str
    folder: Folder
    described: BaseModel
    num_bytes: int


def find_folder(place: str, hub: Hub | None = None) -> Folder:
    """The folder of a place, which is a folder itself or the id of a model on the hub."""
    return read_folder(expanded(place)) if is_folder(place) else (hub or Hub()).find(place)


def describe(name: str, place: str, folder: Folder) -> BaseModel:
    """What clients are told about a model."""
    architecture = read_architecture(folder)
    context = context_of(architecture) or folder.max_context_tokens
    if context is None:
        context = DEFAULT_CONTEXT_TOKENS
        LOG.warning("base model %r names no longest context; it is taken as %d", name, context)
    return BaseModel(
        name=name,
        max_context_tokens=context,
        arch=folder.arch or folder.model_type,
        vocab_size=int(getattr(architecture.get_text_config(), "vocab_size", 0) or 0),
        tokenizer_id=None if is_folder(place) else place,
        tokenizer_folder=str(folder.path) if folder.has_tokenizer else None,
    )


class Shelf:
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
        self._known = {name: self._look_over(name, place) for name, place in sources.items()}
        self._removed: dict[str, _Known] = {}
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()

    def _look_over(self, name: str, place: str) -> _Known:
        try:
            folder = find_folder(place)
            described = describe(name, place, folder)
        except UnusableModel as error:
            raise UnusableModel(f"base model {name!r}: {error.message}", hint=error.hint) from error
        num_bytes, budget = folder.num_bytes(self._config.dtype), self._config.memory_bytes
        if not fits(num_bytes, budget, {}, ()):
            raise UnusableModel(
                f"base model {name!r} takes {num_bytes:,} bytes as {self._config.dtype}, and "
                f"memory_bytes allows {budget:,} for all",
                hint="Allow more memory, use a smaller dtype, or leave the model out.",
            )
        return _Known(place, folder, described, num_bytes)

    def replace(self, sources: Mapping[str, str], in_use: Collection[str] = ()) -> None:
        """Serve these models from now on.

        One that cannot be used is left out. One that is removed is unloaded unless it is in use,
        and still serves the runs that began on it.
        """
        before = self._removed | self._known
        now: dict[str, _Known] = {}
        for name, place in sources.items():
            known = before.get(name)
            if known is None or (known.place != place and name not in in_use):
                known = self._look_over_or_skip(name, place)
            elif known.place != place:
                LOG.warning("base model %r is in use: it moves to %s at a restart", name, place)
            if known is not None:
                now[name] = known
        for name in before:
            if now.get(name) is not before[name] and name not in in_use:
                self._unload(name)
        self._known, self._removed = now, {name: before[name] for name in before.keys() - now}

    def _look_over_or_skip(self, name: str, place: str) -> _Known | None:
        try:
            return self._look_over(name, place)
        except UnusableModel as error:
            LOG.warning("%s; it is left out", error.message)
            return None

    def describe(self) -> list[BaseModel]:
        """Everything that is served."""
        return [known.described for known in self._known.values()]

    @property
    def loaded(self) -> tuple[str, ...]:
        """The models in memory, longest unused first."""
        return tuple(self._loaded)

    def get(self, name: str) -> Loaded:
        """A model, loaded now if it is not in memory; that takes as long as its disk does."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        known = self._find(name)
        self._make_room(name, known.num_bytes)
        found = load(name, known.folder, self._config, known.described.max_context_tokens)
        self._loaded[name] = found
        return found

    def has_room(self, name: str) -> bool:
        """Whether `get` keeps to the budget now, which it does not while too many are busy."""
        if name in self._loaded:
            return True
        sizes = self._sizes()
        needed = self._find(name).num_bytes
        return fits(needed, self._config.memory_bytes, sizes, self._busy())

    def close(self) -> None:
        """Let go of all models."""
        self._loaded.clear()

    def _find(self, name: str) -> _Known:
        known = self._known.get(name) or self._removed.get(name)
        if known is None:
            raise InvalidInput(unknown_model(name, self._known))
        return known

    def _make_room(self, name: str, needed_bytes: int) -> None:
        budget = self._config.memory_bytes
        for doomed in to_evict(needed_bytes, budget, self._sizes(), self._busy()):
            LOG.info("base model %r makes room for %r", doomed, name)
            self._unload(doomed)
        held = sum(self._sizes().values())
        if not fits(needed_bytes, budget, self._sizes(), self._loaded):
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

    def _sizes(self) -> dict[str, int]:
        return {name: found.num_bytes for name, found in self._loaded.items()}

    def _busy(self) -> set[str]:
        return {name for name in self._loaded if self._is_busy(name)}
