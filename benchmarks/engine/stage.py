"""Both sides with the same model, loaded on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine.baseline import Peft
from benchmarks.engine.ours import Ours
from benchmarks.engine.shapes import Shape, write_model

#: Training steps before sampling, so that the adapter has an effect.
WARM_STEPS = 3


class Stage:
    """Both sides with the same base model and adapters."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.directory = directory
        self._adapters: dict[str, Path] = {}

    @cached_property
    def folder(self) -> Path:
        """Directory of the model."""
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
        """Create an adapter with equal weights on both sides; returns its directory."""
        if name not in self._adapters:
            directory = self.directory / name
            self._adapters[name] = self.ours.create(name, directory, seed=seed, num_steps=num_steps)
            self.peft.load(name, directory)
        self.peft.activate(name)
        return self._adapters[name]

    def samplers(self, num: int) -> list[Path]:
        """Create adapters to sample from and activate the first."""
        directories = [
            self.adapter(f"sampler-{index}", seed=100 + index, num_steps=WARM_STEPS)
            for index in range(num)
        ]
        self.peft.activate("sampler-0")
        return directories

    def close(self) -> None:
        """Release both sides."""
        if "ours" in self.__dict__:
            self.ours.engine.close()
        for side in ("ours", "peft"):
            self.__dict__.pop(side, None)


@contextmanager
def stage(shape: Shape) -> Iterator[Stage]:
    """Open a stage in a temporary directory."""
    with TemporaryDirectory() as directory:
        opened = Stage(shape, Path(directory))
        try:
            yield opened
        finally:
            opened.close()
