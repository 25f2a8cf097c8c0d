"""A model with both sides on it, loaded when first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine.baseline import Peft
from benchmarks.engine.ours import Ours
from benchmarks.engine.shapes import Shape, write_model

#: Steps that give an adapter a direction before it is sampled from.
WARM_STEPS = 3


class Stage:
    """Both sides, with the same base model and the same adapters."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.directory = directory
        self._adapters: dict[str, Path] = {}

    @cached_property
    def folder(self) -> Path:
        """Where the model is."""
        return write_model(self.shape, self.directory / "model")

    @cached_property
    def ours(self) -> Ours:
        """Our side."""
        return Ours(self.folder)

    @cached_property
    def peft(self) -> Peft:
        """The baseline."""
        return Peft(self.folder)

    def adapter(self, name: str, *, seed: int, num_steps: int = 0) -> Path:
        """An adapter that both sides have, with the same weights; returns where it is saved."""
        if name not in self._adapters:
            directory = self.directory / name
            self._adapters[name] = self.ours.create(name, directory, seed=seed, num_steps=num_steps)
            self.peft.load(name, directory)
        self.peft.activate(name)
        return self._adapters[name]

    def samplers(self, num: int) -> list[Path]:
        """Adapters to sample from; the first is active."""
        found = [
            self.adapter(f"sampler-{index}", seed=100 + index, num_steps=WARM_STEPS)
            for index in range(num)
        ]
        self.peft.activate("sampler-0")
        return found

    def close(self) -> None:
        """Let go of both sides."""
        if "ours" in self.__dict__:
            self.ours.engine.close()
        for side in ("ours", "peft"):
            self.__dict__.pop(side, None)


@contextmanager
def stage(shape: Shape) -> Iterator[Stage]:
    """A stage in a temporary directory."""
    with TemporaryDirectory() as directory:
        made = Stage(shape, Path(directory))
        try:
            yield made
        finally:
            made.close()
