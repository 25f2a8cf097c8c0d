"""Growth of cost with tokens, with adapters in memory and with requests served.

`python -m benchmarks.engine.scaling FOLDER` prints the results. It runs in its own process, because
it measures memory.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import run_json
from benchmarks.engine import workloads
from benchmarks.engine.ours import MODEL, Ours, make_pass
from benchmarks.engine.process_memory import peak_of, rss_bytes, settle
from benchmarks.engine.shapes import RANK, THREADS, Shape, write_model
from benchmarks.engine.workloads import Example, Prompt
from tinkex.engine.protocol import AdapterSpec

SEQUENCE_TOKENS = 128
TOKEN_SIZES = (512, 1024, 2048, 4096, 8192)
NUM_IDLE = 16
NUM_REQUESTS = 160
NAME = "growth"


@dataclass(frozen=True, slots=True)
class Slope:
    """A measured growth, its limit and the points behind it."""

    name: str
    measured: str
    limit: str
    is_met: bool
    points: str


def measure_growth(shape: Shape, *, is_quick: bool = False) -> list[Slope]:
    """Run all three sweeps in a new process."""
    with TemporaryDirectory() as directory:
        folder = write_model(shape, Path(directory) / "model")
        command = [sys.executable, "-m", "benchmarks.engine.scaling", str(folder)]
        command += [str(shape.vocab_size), "quick" if is_quick else "full"]
        results = run_json(command, OMP_NUM_THREADS=str(THREADS))
    return [Slope(**each) for each in results["slopes"]]


class Sweep:
    """Sweeps of one engine."""

    def __init__(self, folder: Path, vocab_size: int, *, is_quick: bool) -> None:
        self._ours = Ours(folder)
        self._vocab_size = vocab_size
        self._is_quick = is_quick
        self._rng = np.random.default_rng(11)
        self._directory = self._ours.create(NAME, folder.with_name(NAME), num_steps=1)

    def run(self) -> list[Slope]:
        """Run all sweeps; tokens first, while the heap is not fragmented."""
        return [*self._tokens(), *self._adapters(), *self._requests()]

    # --- tokens -----------------------------------------------------------------------------
    def _tokens(self) -> list[Slope]:
        sizes = TOKEN_SIZES[:-1] if self._is_quick else TOKEN_SIZES
        self._step(self._examples(sizes[0]))
        seconds, peaks = [], []
        for size in sizes:
            examples = self._examples(size)
            started = time.perf_counter()
            peaks.append(peak_of(lambda: self._step(examples)))  # noqa: B023 - called at once
            seconds.append(time.perf_counter() - started)
        power = _power(sizes, seconds)
        bytes_per_token = _slope(sizes[:-1], peaks[:-1])
        times = ", ".join(f"{n}: {1e6 * s / n:.0f} us" for n, s in zip(sizes, seconds, strict=True))
        memory = ", ".join(f"{n}: {p / 1e6:.0f} MB" for n, p in zip(sizes, peaks, strict=True))
        power_of_memory = _power(sizes, peaks)
        return [
            Slope(
                "time of a training step with its tokens",
                f"tokens^{power:.2f}",
                "linear: at most ^1.1",
                power <= 1.1,
                f"per token at {times}",
            ),
            Slope(
                "peak memory of a training step with its tokens",
                f"tokens^{power_of_memory:.2f}, {bytes_per_token / 1e3:.0f} kB per token",
                "linear at most: ^1.1",
                power_of_memory <= 1.1,
                memory,
            ),
        ]

    # --- adapters ---------------------------------------------------------------------------
    def _adapters(self) -> list[Slope]:
        examples = self._examples(SEQUENCE_TOKENS)
        before_all = self._median_step_seconds(examples)
        settle()
        before = rss_bytes()
        for index in range(NUM_IDLE):
            spec = AdapterSpec(base_model=MODEL, rank=RANK, seed=index)
            self._ours.engine.create(f"idle-{index}", spec)
        grown = (rss_bytes() - before) / NUM_IDLE
        own = self._own_bytes()
        with_idle = self._median_step_seconds(examples)
        for index in range(NUM_IDLE):
            self._ours.engine.drop(f"idle-{index}")
        alone = (before_all + self._median_step_seconds(examples)) / 2
        return [
            Slope(
                "memory with idle adapters",
                f"{grown / 1e6:.1f} MB each",
                f"own bytes: at most {own / 1e6:.1f} MB for weights and both moments",
                grown <= 1.05 * own,
                f"{NUM_IDLE} adapters of rank {RANK}",
            ),
            Slope(
                "time of a training step with idle adapters",
                f"x {with_idle / alone:.2f}",
                "flat: at most x 1.1",
                with_idle <= 1.1 * alone,
                f"{1e3 * alone:.0f} ms alone, {1e3 * with_idle:.0f} ms beside {NUM_IDLE}",
            ),
        ]

    def _own_bytes(self) -> int:
        """Bytes of the weights and two moments; the file stores the weights as in memory."""
        weights = next(self._directory.glob("*.safetensors")).stat().st_size
        return 3 * weights

    # --- requests ---------------------------------------------------------------------------
    def _requests(self) -> list[Slope]:
        num = NUM_REQUESTS // 2 if self._is_quick else NUM_REQUESTS
        seconds, sizes = [], []
        for _ in range(num):
            started = time.perf_counter()
            self._serve_one()
            seconds.append(time.perf_counter() - started)
            sizes.append(rss_bytes())
        half, part = num // 2, num // 5
        growth = _slope(range(half, num), sizes[half:])
        early, late = median(seconds[part : 2 * part]), median(seconds[-part:])
        return [
            Slope(
                "memory with requests served",
                f"{growth / 1e3:+.1f} kB per request",
                "flat: at most 10 kB",
                growth <= 10e3,
                f"{sizes[half] / 1e6:.0f} MB after {half}, {sizes[-1] / 1e6:.0f} MB after {num}",
            ),
            Slope(
                "time of a request with requests served",
                f"x {late / early:.2f}",
                "flat: at most x 1.1",
                late <= 1.1 * early,
                f"{1e3 * early:.0f} ms early, {1e3 * late:.0f} ms late",
            ),
        ]

    def _serve_one(self) -> None:
        """Run a short pass, a step and a short sample with a new prompt."""
        self._step(self._examples(16, num_tokens=16))
        tokens = self._rng.integers(1, self._vocab_size, size=16).tolist()
        self._ours.sample([Prompt(tokens, 4)], [self._directory])

    # --- helpers ----------------------------------------------------------------------------
    def _examples(self, total: int, num_tokens: int = SEQUENCE_TOKENS) -> list[Example]:
        return [
            workloads.example(self._rng, self._vocab_size, num_tokens)
            for _ in range(total // num_tokens)
        ]

    def _step(self, examples: list[Example]) -> None:
        self._ours.forward_backward([make_pass(NAME, examples)])
        self._ours.optim_step(NAME)

    def _median_step_seconds(self, examples: list[Example]) -> float:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            self._step(examples)
            seconds.append(time.perf_counter() - started)
        return median(seconds)


def _slope(x: Any, y: Any) -> float:
    return float(np.polyfit(np.asarray(x, dtype=float), np.asarray(y, dtype=float), 1)[0])


def _power(x: Any, y: Any) -> float:
    """Exponent of the best fitting power law."""
    return _slope(np.log(x), np.log(y))


def main(folder: str, vocab_size: str, mode: str) -> None:
    """Print the results as JSON."""
    sweep = Sweep(Path(folder), int(vocab_size), is_quick=mode == "quick")
    slopes = [{name: getattr(each, name) for name in Slope.__slots__} for each in sweep.run()]
    print(json.dumps({"slopes": slopes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
