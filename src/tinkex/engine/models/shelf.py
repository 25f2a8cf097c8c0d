"""The base models of an engine: all are known, some are in memory."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
from tinkex.engine.models.sources import is_folder
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.settings import expanded

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
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
        return _Known(folder, described, num_bytes)

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
        known = self._known.get(name)
        if known is not None:
            return known
        if not self._known:
            raise InvalidInput(
                f"base model {name!r:.200} is not served here, and no other is: add one with "
                "`tinkex model add smollm2-135m` and start the server again"
            )
        there = ", ".join(self._known)
        raise InvalidInput(f"base model {name!r:.200} is not served here; there is: {there}")

    def _make_room(self, name: str, needed_bytes: int) -> None:
        budget = self._config.memory_bytes
        for doomed in to_evict(needed_bytes, budget, self._sizes(), self._busy()):
            LOG.info("base model %r makes room for %r", doomed, name)
            self._on_evict(doomed)
            del self._loaded[doomed]
            # Modules and their tensors refer to each other.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        held = sum(self._sizes().values())
        if not fits(needed_bytes, budget, self._sizes(), self._loaded):
            LOG.warning(
                "base model %r takes %d bytes beside %d of models that are busy: more than the %d "
                "of memory_bytes",
                *(name, needed_bytes, held, budget),
            )

    def _sizes(self) -> dict[str, int]:
        return {name: found.num_bytes for name, found in self._loaded.items()}

    def _busy(self) -> set[str]:
        return {name for name in self._loaded if self._is_busy(name)}
