"""`tinkex worker --engine vllm` beside a server, with vLLM and with a process like it.

The tests with vLLM need its environment: `scripts/install-vllm.sh`, or VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.fake_vllm import write_python
from tests.support.model_folder_files import write_folder
from tests.support.serve_process import MODEL, TIMEOUT_SECONDS, ServeProcess, eventually
from tinkex.models import built_in
from tinkex.text import load_tokenizer

if TYPE_CHECKING:
    import tinker

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".vllm/bin/python"))
#: vLLM imports and loads for a long time on a busy machine.
START_SECONDS = 600.0
TINY = "tinkex/tiny"
_PID = re.compile(r"the process of vLLM has pid (\d+)")


class VllmWorker:
    """A `tinkex worker` with vLLM; its log tells the pids of vLLM."""

    def __init__(self, home: Path, python: Path, model: str, options: str = "{}") -> None:
        self.log = home.parent / "worker.log"
        words = ["--home", str(home), "--group", "vllm", "--model", model]
        words += ["--engine", "vllm", "--vllm-python", str(python)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinkex", "worker", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "TINKEX_VLLM_OPTIONS": options,
                    "OMP_NUM_THREADS": "1",
                    "TINKEX_LOG": "debug",
                },
                process_group=0,
            )

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in _PID.findall(self.log.read_text())]

    def wait_until_started(self, num_starts: int = 1) -> None:
        """Wait for the start of vLLM of this number."""
        text = self.log.read_text
        eventually(
            lambda: (
                text().count("is ready, after") >= num_starts or self.process.poll() is not None
            ),
            START_SECONDS,
        )
        assert self.process.poll() is None, text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(TIMEOUT_SECONDS)


StartVllm = Callable[..., VllmWorker]


@pytest.fixture
def start_vllm(home: Path) -> Iterator[StartVllm]:
    started: list[VllmWorker] = []

    def start(*args: object) -> VllmWorker:
        worker = VllmWorker(home, *args)  # type: ignore[arg-type]
        started.append(worker)
        worker.wait_until_started()
        return worker

    yield start
    for worker in started:
        worker.end()


def groups_of_samples(server: ServeProcess) -> Counter[str]:
    """How many samples each group has run, without those that measure the drift."""
    query = (
        "SELECT group_id, count(*) FROM jobs WHERE kind = 'asample' AND tenant_id NOT LIKE '%:%'"
    )
    with closing(sqlite3.connect(server.home.store_file)) as db:
        return Counter(dict(db.execute(f"{query} AND state = 'done' GROUP BY group_id")))


def has_group(server: ServeProcess, state: str) -> bool:
    with closing(sqlite3.connect(server.home.store_file)) as db:
        found = db.execute("SELECT state FROM groups WHERE id = 'vllm'").fetchone()
    return found is not None and found[0] == state


def read_metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode())


def kill_vllm(worker: VllmWorker) -> None:
    os.kill(worker.pids[-1], signal.SIGKILL)


# --- with a process that speaks the protocol ------------------------------------------------------
def test_worker_with_vllm_samples_and_restarts(
    serve: Serve, home: Path, start_vllm: StartVllm, tmp_path: Path
) -> None:
    server = serve(home, "--sampler", f"{MODEL}=vllm")
    url = server.ready()
    folder = write_folder(tmp_path / "model")
    worker = start_vllm(write_python(tmp_path / "fake"), f"{MODEL}={folder}")
    eventually(lambda: has_group(server, "ready"))
    prompt = tinkex.ModelInput.from_ints([1, 2, 3])
    params = tinkex.SamplingParams(max_tokens=8, seed=1, temperature=1.0)
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        sampler = training.save_weights_and_get_sampling_client()
        # The server reads the list of groups once a second.
        eventually(
            lambda: (
                bool(sampler.sample(prompt, 1, params).result(TIMEOUT_SECONDS))
                and groups_of_samples(server)["vllm"] > 0
            )
        )
        kill_vllm(worker)
        before = groups_of_samples(server)
        for _ in range(3):
            sampler.sample(prompt, 1, params).result(TIMEOUT_SECONDS)
        assert sum(groups_of_samples(server).values()) == sum(before.values()) + 3
        worker.wait_until_started(2)
        num_before = groups_of_samples(server)["vllm"]
        eventually(
            lambda: (
                bool(sampler.sample(prompt, 1, params).result(TIMEOUT_SECONDS))
                and groups_of_samples(server)["vllm"] > num_before
            )
        )
        eventually(
            lambda: f'tinkex_sampler_drift_mean{{base_model="{MODEL}"}}' in read_metrics(url)
        )
    worker.end()
    assert worker.process.returncode == 0, worker.log.read_text()
    assert has_group(server, "retired")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the engine 'vllm' needs vllm_python"),
        (
            ["--vllm-python", "/nothing"],
            "a worker with vLLM serves one base model, but 0 are given",
        ),
    ],
)
def test_worker_without_its_settings_is_one_sentence(
    home: Path, words: list[str], sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinkex", "worker", "--home", str(home), "--engine", "vllm", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 1 and sentence in done.stderr
    assert "Traceback" not in done.stderr


# --- with vLLM -----------------------------------------------------------------------------------
def make_datum(seed: int) -> tinker.Datum:
    import tinker

    tokens = [(7 * seed + 13 * index) % 1500 + 3 for index in range(30)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[29]),
            "weights": tinker.TensorData(data=[1.0] * 29, dtype="float32", shape=[29]),
        },
    )


def train_sampler(service: tinker.ServiceClient, seed: int, **lora: bool) -> tinker.SamplingClient:
    """Train an adapter until it differs from the base model, and sample from it."""
    import tinker

    client = service.create_lora_training_client(TINY, rank=8, seed=seed, **lora)
    for number in range(3):
        client.forward_backward([make_datum(seed + number)], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(TIMEOUT_SECONDS)
    return client.save_weights_and_get_sampling_client()


def measure_drift(sampler: tinker.SamplingClient, seed: int, **params: float) -> list[float]:
    """Sample with vLLM, score with the trainer, and return the differences."""
    import tinker

    prompt = tinker.ModelInput.from_ints(
        [(seed * 31 + 17 * index) % 1500 + 3 for index in range(20)]
    )
    settings = tinker.SamplingParams(
        **{"max_tokens": 48, "seed": seed, "temperature": 1.0, **params}, stop=[]
    )
    sampled = sampler.sample(prompt, 1, settings).result(TIMEOUT_SECONDS).sequences[0]
    assert sampled.logprobs is not None
    whole = tinker.ModelInput.from_ints([*prompt.to_ints(), *sampled.tokens])
    scored = sampler.compute_logprobs(whole).result(TIMEOUT_SECONDS)
    return [
        abs((own or 0.0) - theirs)
        for own, theirs in zip(scored[-len(sampled.tokens) :], sampled.logprobs, strict=True)
    ]


@pytest.mark.slow
# The official clients have no way to close their connections.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="run scripts/install-vllm.sh")
def test_official_sdk_samples_with_vllm(serve: Serve, home: Path, start_vllm: StartVllm) -> None:
    import tinker

    server = serve(
        home, "--engine", "local", "--sampler", f"{TINY}=vllm", env={"OMP_NUM_THREADS": "1"}
    )
    url = server.ready()
    # Fewer places than adapters, so that they are evicted and loaded again.
    options = {"enforce_eager": True, "max_loras": 2, "max_cpu_loras": 2}
    worker = start_vllm(VLLM_PYTHON, TINY, json.dumps(options))
    eventually(lambda: has_group(server, "ready"))
    service = tinker.ServiceClient(base_url=url, api_key=server.key)
    base = service.create_sampling_client(base_model=TINY)
    samplers = [train_sampler(service, 1), train_sampler(service, 2)]
    samplers += [train_sampler(service, 3, train_unembed=False), base]
    drifts: list[float] = []
    for round_ in range(2):
        for number, sampler in enumerate(samplers):
            drifts += measure_drift(sampler, 10 * round_ + number)
        drifts += measure_drift(base, 100 + round_, temperature=0.0)
    # Scores of prompts are declined by vLLM, so half of the requests ran on each group.
    counts = groups_of_samples(server)
    assert counts["vllm"] == counts[""] == 10, counts
    mean = sum(drifts) / len(drifts)
    # Shown by `pytest -s`.
    sys.stderr.write(f"drift of {len(drifts)} tokens: mean {mean:.1e}, max {max(drifts):.1e}\n")
    assert max(drifts) < 1e-3 and mean < 1e-4
    eventually(lambda: f'drift_mean{{base_model="{TINY}"}}' in read_metrics(url))

    check_stops_and_cache(server, url, base)
    check_cancel(server, url)

    kill_vllm(worker)
    before = sum(groups_of_samples(server).values())
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=8)
    answers = [sampler.sample(prompt, 1, params) for sampler in samplers * 3]
    assert all(answer.result(TIMEOUT_SECONDS).sequences for answer in answers)
    assert sum(groups_of_samples(server).values()) == before + len(answers)
    worker.wait_until_started(2)
    eventually(lambda: has_group(server, "ready"))
    num_before = groups_of_samples(server)["vllm"]
    eventually(
        lambda: (
            bool(samplers[0].sample(prompt, 1, params).result(TIMEOUT_SECONDS))
            and groups_of_samples(server)["vllm"] > num_before
        )
    )
    assert max(measure_drift(samplers[0], 77)) < 1e-3
    starts = re.findall(r"is ready, after (\S+) s", worker.log.read_text())
    sys.stderr.write(f"starts of vLLM: {starts} s\n")


def check_stops_and_cache(server: ServeProcess, url: str, base: tinker.SamplingClient) -> None:
    """Stop tokens and texts end a sample; cached prompts are not shared between tenants."""
    import tinker

    prompt = tinker.ModelInput.from_ints([5, 6, 7])
    greedy = {"max_tokens": 30, "temperature": 0.0, "seed": 1}
    free = base.sample(prompt, 1, tinker.SamplingParams(**greedy, stop=[])).result(TIMEOUT_SECONDS)
    tokens = free.sequences[0].tokens
    assert len(tokens) == 30 and free.sequences[0].stop_reason == "length"
    for stop in ([tokens[1]], [load_tokenizer(built_in()[TINY]).decode([tokens[1]])]):
        params = tinker.SamplingParams(**greedy, stop=stop)
        ended = base.sample(prompt, 1, params).result(TIMEOUT_SECONDS).sequences[0]
        assert (ended.tokens, ended.stop_reason) == (tokens[: tokens.index(tokens[1]) + 1], "stop")
    long = tinkex.ModelInput.from_ints([index % 1500 + 3 for index in range(400)])
    one = tinkex.SamplingParams(max_tokens=1, temperature=0.0)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tinkex",
            "-f",
            "json",
            "key",
            "create",
            "--tenant",
            "other",
            "--home",
            str(server.home.root),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    hits = []
    for key in (server.key, server.key, json.loads(done.stdout)["key"]):
        with tinkex.ServiceClient(base_url=url, api_key=key) as service:
            sampler = service.create_sampling_client(base_model=TINY)
            hits.append(
                sampler.sample(long, 1, one).result(TIMEOUT_SECONDS).prompt_cache_hit_tokens
            )
    assert hits[0] == hits[2] == 0 and hits[1] > 300, hits


def check_cancel(server: ServeProcess, url: str) -> None:
    """A cancelled sample ends, and the next one does not wait for it."""
    with tinkex.ServiceClient(base_url=url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=TINY)
        prompt = tinkex.ModelInput.from_ints([5, 6])
        endless = sampler.sample(prompt, 32, tinkex.SamplingParams(max_tokens=2000, stop=[]))
        eventually(lambda: is_running(server))
        assert endless.cancel()
        sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=2)).result(TIMEOUT_SECONDS)
        eventually(lambda: not is_running(server))


def is_running(server: ServeProcess) -> bool:
    with closing(sqlite3.connect(server.home.store_file)) as db:
        query = "SELECT count(*) FROM jobs WHERE state = 'running' AND group_id = 'vllm'"
        return bool(db.execute(query).fetchone()[0])
