"""Our side: the engine in this process, called like the worker calls it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.engine.shapes import LEARNING_RATE, RANK, THREADS
from benchmarks.engine.workloads import Example, Prompt
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import AdapterSpec, EngineFailure, Pass, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)

MODEL = "benchmark/model"
ADAM = AdamParams(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0)


def datum(example: Example) -> Datum:
    """Convert an example to a Datum."""
    return Datum(
        model_input=ModelInput.from_ints(example.tokens),
        loss_fn_inputs={
            "target_tokens": np.array(example.targets),
            "weights": np.array(example.weights, dtype=np.float32),
        },
    )


def make_pass(adapter_id: str, examples: Sequence[Example]) -> Pass:
    """Make a cross-entropy pass of one adapter."""
    data = [datum(each) for each in examples]
    return Pass(adapter_id=adapter_id, request=ForwardBackwardInput(data, "cross_entropy"))


class Ours:
    """An engine with one base model."""

    def __init__(self, folder: Path) -> None:
        self.engine = TorchEngine({MODEL: str(folder)}, EngineConfig(threads=THREADS))
        self._num_tickets = 0

    def create(
        self, adapter_id: str, directory: Path, *, seed: int = 0, num_steps: int = 0
    ) -> Path:
        """Create an adapter, train it for a few steps and save it for the baseline."""
        spec = AdapterSpec(base_model=MODEL, rank=RANK, seed=seed)
        self.engine.create(adapter_id, spec)
        rng = np.random.default_rng([8, seed])
        for _ in range(num_steps):
            tokens: list[int] = rng.integers(1, 1000, size=33).tolist()
            self.forward_backward([make_pass(adapter_id, [Example(tokens[:-1], tokens[1:], 0)])])
            self.optim_step(adapter_id)
        directory.mkdir(parents=True)
        self.engine.save(adapter_id, directory, with_optimizer=False)
        return directory

    def forward_backward(self, passes: Sequence[Pass]) -> list[float]:
        """Run passes together; returns their losses."""
        losses = []
        for outcome in self.engine.run_passes(passes):
            if isinstance(outcome, EngineFailure):
                raise RuntimeError(outcome.message)
            losses.append(outcome.metrics["loss:sum"])
        return losses

    def optim_step(self, adapter_id: str) -> None:
        """Apply and clear the gradient."""
        self.engine.optim_step(adapter_id, ADAM)

    # --- sampling ---------------------------------------------------------------------------
    def sample(
        self, prompts: Sequence[Prompt], directories: Sequence[Path]
    ) -> list[SampledSequence]:
        """Greedy tokens after each prompt; each request starts at its arrival time."""
        requests = [
            (prompt, _source(directories[prompt.sampler]), _request(prompt, 1, temperature=0.0))
            for prompt in prompts
        ]
        started = time.perf_counter()
        waiting, tickets = list(requests), []
        answers: dict[str, SampleResponse] = {}
        while len(answers) < len(requests):
            now = time.perf_counter() - started
            while waiting and waiting[0][0].arrives_at <= now and self._has_capacity:
                _, source, request = waiting.pop(0)
                tickets.append(self._start(source, request))
            if not self.engine.num_samples:
                time.sleep(max(0.0, waiting[0][0].arrives_at - now))
            answers |= self._step()
        return [answers[ticket].sequences[0] for ticket in tickets]

    def draw(self, prompt: Prompt, num_samples: int, directory: Path) -> list[SampledSequence]:
        """Draw samples at temperature 1 from the whole vocabulary."""
        ticket = self._start(
            _source(directory), _request(prompt, num_samples, temperature=1.0, seed=1)
        )
        answers: dict[str, SampleResponse] = {}
        while ticket not in answers:
            answers |= self._step()
        return list(answers[ticket].sequences)

    @property
    def _has_capacity(self) -> bool:
        return self.engine.num_samples < self.engine.max_samples

    def _start(self, source: SamplerSource, request: SampleRequest) -> str:
        self._num_tickets += 1
        ticket = f"ticket-{self._num_tickets}"
        self.engine.start_sample(ticket, source, request)
        return ticket

    def _step(self) -> dict[str, SampleResponse]:
        finished = {}
        for ticket, outcome in self.engine.step_samples():
            if isinstance(outcome, EngineFailure):
                raise RuntimeError(outcome.message)
            finished[ticket] = outcome
        return finished


def _source(directory: Path) -> SamplerSource:
    return SamplerSource(base_model=MODEL, directory=directory)


def _request(
    prompt: Prompt, num_samples: int, *, temperature: float, seed: int | None = None
) -> SampleRequest:
    return SampleRequest(
        num_samples=num_samples,
        prompt=ModelInput.from_ints(prompt.tokens),
        sampling_params=SamplingParams(
            max_tokens=prompt.num_new, temperature=temperature, seed=seed, stop=[]
        ),
    )
