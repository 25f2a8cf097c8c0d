"""Sample requests on their way: first come, first served, a short step at a time."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.checkpoints.summaries import WEIGHTS_NAME, read_summary
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.files import read_model
from tinkex.engine.fake.limits import check_sample
from tinkex.engine.fake.sampler import Sampler
from tinkex.engine.protocol import Failure, Finished, SamplerSource
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types import SampleRequest, SampleResponse

#: How long one step goes on before it hands out what is over.
STEP_SECONDS = 0.02
#: How many checkpoints are kept ready.
MAX_SAMPLERS = 64

_DICE = random.SystemRandom()


class SamplerShelf:
    """Weights that are ready to be sampled from; those not used for longest make room."""

    def __init__(self, bases: Mapping[str, Bigram]) -> None:
        self._bases = {name: Sampler(model) for name, model in bases.items()}
        self._saved: OrderedDict[tuple[Path, int, int], Sampler] = OrderedDict()

    def find(self, source: SamplerSource) -> Sampler:
        """The sampler of a source; InvalidInput or CheckpointError if there is none."""
        base = self._bases.get(source.base_model)
        if base is None:
            raise InvalidInput(
                f"base model {source.base_model!r} is not one of {', '.join(self._bases)}"
            )
        if source.directory is None:
            return base
        # A directory may be replaced by another of the same name: the file tells them apart.
        key = _identify(source.directory)
        sampler = self._saved.pop(key, None) or _load(source.directory, source.base_model, base)
        self._saved[key] = sampler
        if len(self._saved) > MAX_SAMPLERS:
            self._saved.popitem(last=False)
        return sampler

    def clear(self) -> None:
        """Forget what was loaded."""
        self._saved.clear()

    def __len__(self) -> int:
        return len(self._saved)


def _identify(directory: Path) -> tuple[Path, int, int]:
    try:
        status = (directory / WEIGHTS_NAME).stat()
    except OSError:
        raise InvalidInput(f"there are no saved weights in {directory.name!r}") from None
    return directory, status.st_ino, status.st_mtime_ns


def _load(directory: Path, base_model: str, base: Sampler) -> Sampler:
    found = read_summary(directory).base_model
    if found != base_model:
        raise InvalidInput(f"the weights are of base model {found!r}, not of {base_model!r}")
    return Sampler(read_model(directory, base.model.vocab_size))


@dataclass(slots=True, eq=False)
class _Waiting:
    source: SamplerSource
    request: SampleRequest
    steps: Generator[None, None, SampleResponse] | None = None


class SampleQueue:
    """All sample requests that are not over, oldest first."""

    def __init__(self, shelf: SamplerShelf, seconds_per_request: float = 0.0) -> None:
        self._shelf = shelf
        self._seconds_per_request = seconds_per_request
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ticket: str, source: SamplerSource, request: SampleRequest) -> None:
        """Let a request wait for its turn; a ticket that waits already starts anew."""
        self._waiting[ticket] = _Waiting(source, request)

    def cancel(self, ticket: str) -> None:
        """Forget a request; one that is not there is no error."""
        self._waiting.pop(ticket, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()

    def step(self) -> list[Finished]:
        """Work for a short time and hand out what is over.

        A slow engine finishes one request per step, and takes its time for it.
        """
        if self._seconds_per_request > 0.0 and self._waiting:
            time.sleep(self._seconds_per_request)
            return [self._finish_first()]
        deadline = time.monotonic() + STEP_SECONDS
        finished: list[Finished] = []
        while self._waiting:
            over = self._advance_first()
            if over is not None:
                finished.append(over)
            if time.monotonic() >= deadline:
                break
        return finished

    def _finish_first(self) -> Finished:
        while True:
            over = self._advance_first()
            if over is not None:
                return over

    def _advance_first(self) -> Finished | None:
        """Draw one sequence of the oldest request; its outcome if it is over."""
        ticket, waiting = next(iter(self._waiting.items()))
        outcome = self._advance(waiting)
        if outcome is None:
            return None
        del self._waiting[ticket]
        return Finished(ticket, outcome)

    def _advance(self, waiting: _Waiting) -> SampleResponse | Failure | None:
        try:
            if waiting.steps is None:
                check_sample(waiting.request)
                sampler = self._shelf.find(waiting.source)
                waiting.steps = sampler.start(waiting.request, _DICE)
            next(waiting.steps)
        except StopIteration as end:
            response: SampleResponse = end.value
            return response
        except (InvalidInput, CheckpointError) as error:
            return Failure(error.message, error.category)
        return None
