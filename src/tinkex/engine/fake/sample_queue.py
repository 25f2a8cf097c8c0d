"""Sample requests on their way: first come, first served, a short step at a time."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.checkpoints.metadata import WEIGHTS_NAME, read_metadata
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.limits import check_sample
from tinkex.engine.fake.sampler import BigramSampler
from tinkex.engine.fake.storage import read_model
from tinkex.engine.protocol import EngineFailure, FinishedSample, SamplerSource
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types import SampleRequest, SampleResponse

#: How long one step goes on before it hands out what is over.
STEP_SECONDS = 0.02
#: How many checkpoints are kept ready.
MAX_SAMPLERS = 64

_SYSTEM_RANDOM = random.SystemRandom()


class FakeSamplerCache:
    """Weights that are ready to be sampled from; those not used for longest make room."""

    def __init__(self, bases: Mapping[str, Bigram]) -> None:
        self._bases = {name: BigramSampler(model) for name, model in bases.items()}
        self._entries: OrderedDict[tuple[Path, int, int], BigramSampler] = OrderedDict()

    def get_or_load(self, source: SamplerSource) -> BigramSampler:
        """The sampler of a source; InvalidInput or CheckpointError if there is none."""
        base = self._bases.get(source.base_model)
        if base is None:
            raise InvalidInput(
                f"base model {source.base_model!r} is not one of {', '.join(self._bases)}"
            )
        if source.directory is None:
            return base
        # A directory may be replaced by another of the same name: the file tells them apart.
        key = _cache_key(source.directory)
        sampler = self._entries.pop(key, None) or _load_sampler(
            source.directory, source.base_model, base
        )
        self._entries[key] = sampler
        if len(self._entries) > MAX_SAMPLERS:
            self._entries.popitem(last=False)
        return sampler

    def clear(self) -> None:
        """Forget what was loaded."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def _cache_key(directory: Path) -> tuple[Path, int, int]:
    try:
        status = (directory / WEIGHTS_NAME).stat()
    except OSError:
        raise InvalidInput(f"there are no saved weights in {directory.name!r}") from None
    return directory, status.st_ino, status.st_mtime_ns


def _load_sampler(directory: Path, base_model: str, base: BigramSampler) -> BigramSampler:
    found = read_metadata(directory).base_model
    if found != base_model:
        raise InvalidInput(f"the weights are of base model {found!r}, not of {base_model!r}")
    return BigramSampler(read_model(directory, base.model.vocab_size))


@dataclass(slots=True, eq=False)
class _QueuedSample:
    source: SamplerSource
    request: SampleRequest
    steps: Generator[None, None, SampleResponse] | None = None


class FakeSampleQueue:
    """All sample requests that are not over, oldest first."""

    def __init__(self, sampler_cache: FakeSamplerCache, seconds_per_request: float = 0.0) -> None:
        self._sampler_cache = sampler_cache
        self._seconds_per_request = seconds_per_request
        self._queue: dict[str, _QueuedSample] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Let a request wait for its turn; a ticket that waits already starts anew."""
        self._queue[job_id] = _QueuedSample(source, request)

    def cancel(self, job_id: str) -> None:
        """Forget a request; one that is not there is no error."""
        self._queue.pop(job_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._queue.clear()

    def step(self) -> list[FinishedSample]:
        """Work for a short time and hand out what is over.

        A slow engine finishes one request per step, and takes its time for it.
        """
        if self._seconds_per_request > 0.0 and self._queue:
            time.sleep(self._seconds_per_request)
            return [self._finish_first()]
        deadline = time.monotonic() + STEP_SECONDS
        finished: list[FinishedSample] = []
        while self._queue:
            over = self._advance_first()
            if over is not None:
                finished.append(over)
            if time.monotonic() >= deadline:
                break
        return finished

    def _finish_first(self) -> FinishedSample:
        while True:
            over = self._advance_first()
            if over is not None:
                return over

    def _advance_first(self) -> FinishedSample | None:
        """Draw one sequence of the oldest request; its outcome if it is over."""
        ticket, waiting = next(iter(self._queue.items()))
        outcome = self._advance(waiting)
        if outcome is None:
            return None
        del self._queue[ticket]
        return FinishedSample(ticket, outcome)

    def _advance(self, sample: _QueuedSample) -> SampleResponse | EngineFailure | None:
        try:
            if sample.steps is None:
                check_sample(sample.request)
                sampler = self._sampler_cache.get_or_load(sample.source)
                sample.steps = sampler.start(sample.request, _SYSTEM_RANDOM)
            next(sample.steps)
        except StopIteration as end:
            response: SampleResponse = end.value
            return response
        except (InvalidInput, CheckpointError) as error:
            return EngineFailure(error.message, error.category)
        return None
