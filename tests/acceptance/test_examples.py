"""The examples do what they claim, on a server of this machine that they find by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Protocol

import pytest

from tests.support.engine_server import LocalServer
from tests.support.tiny_model_folders import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
#: It comes with the package, and answers after a few seconds.
MODEL = ("--base-model", "tinkex/tiny")
NAMES = ("sft", "dpo", "grpo", "distill", "multi_tenant", "openai_client", "resume")
#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 240.0
#: One that samples, one with two clients, one with a process of its own; the others are simpler.
INTERRUPTED = ("grpo", "multi_tenant", "resume")
#: A bar with figures: somebody who watches sees how far it is.
BAR = re.compile(r"\d+/\d+ \|#* *\| \w+ \d")


class Run(Protocol):
    """Runs an example to its end and returns what it printed."""

    def __call__(self, name: str, *options: str) -> str: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server with no model but the one of the package."""
    server = LocalServer(tmp_path_factory.mktemp("examples") / "home", {})
    try:
        server.ready()
        yield server
    finally:
        server.end()


def surroundings(home: Path, **more: str) -> dict[str, str]:
    """With no address and no key: only the home is told."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TINKE")}
    told = {
        "TINKEX_HOME": str(home),
        "TINKER_TELEMETRY": "0",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return kept | told | more


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *options]


@pytest.fixture
def run(server: LocalServer, tmp_path: Path) -> Run:
    def run(name: str, *options: str) -> str:
        done = subprocess.run(
            command(name, *options),
            env=surroundings(server.home.root),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log_text[-3000:]}"
        assert "Traceback" not in done.stderr
        assert BAR.search(done.stderr)
        # The last line says what came of it, and what to do next.
        assert re.fullmatch(r"Done in \d+ s: .+\. Next: tinkex .+", done.stdout.splitlines()[-1])
        return done.stdout

    return run


def moved(output: str, name: str) -> tuple[float, float]:
    """A figure before and after, from a line such as `loss 2.000 -> 1.000`."""
    found = re.search(rf"^{name} (-?[\d.]+) -> (-?[\d.]+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


def test_sft_learns_the_answers(run: Run) -> None:
    output = run("sft", *MODEL, "--steps", "50", "--learning-rate", "0.004")
    before, after = moved(output, "loss")
    assert after < 0.2 * before
    assert re.search(r"^  after: +'Rain that took its time\.'$", output, re.MULTILINE)
    assert re.search(r"says [3-5] of 5 answers as taught\. Next: tinkex chat tinker://", output)


def test_openai_client_gives_the_taught_answers(run: Run) -> None:
    output = run("openai_client", *MODEL, "--steps", "50", "--learning-rate", "0.004")
    assert re.search(r"^  answer: +'Rain that took its time\.'$", output, re.MULTILINE)
    assert re.search(r"says [3-5] of 5 answers as taught\. Next: tinkex chat tinker://", output)


def test_dpo_generalizes_to_held_out_pairs(run: Run) -> None:
    output = run("dpo", *MODEL, "--steps", "12", "--learning-rate", "0.002")
    before, after = moved(output, "loss")
    assert before == pytest.approx(0.693, abs=1e-3)
    assert after < 0.5 * before
    assert moved(output, "margin")[1] > 1.0
    assert moved(output, "held-out margin")[1] > 0.2
    assert "6 of 6 pairs it saw" in output


def test_grpo_increases_reward_and_accuracy(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "transcript.jsonl"
    size = ("--steps", "30", "--num-questions", "6", "--learning-rate", "0.002")
    output = run("grpo", *MODEL, *size, "--transcript", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 30 * 6 * 8
    assert [line["reward"] for line in lines] == [worth(line) for line in lines]
    for name, judge in (("reward", worth), ("right while learning", lambda x: worth(x) > 0)):
        early = fmean(judge(line) for line in lines if line["step"] <= 3)
        late = fmean(judge(line) for line in lines if line["step"] > 27)
        assert moved(output, name) == pytest.approx((early, late), abs=1e-3)
        # However good the model was at the start, half of what it did wrong is gone.
        assert 1 - late < 0.5 * (1 - early)
    before, after = moved(output, "right on unseen questions")
    assert 1 - after < 0.5 * (1 - before)
    assert f"on {round(after * 16)} after" in output


def worth(line: dict[str, str]) -> float:
    """What an answer to a question of the example must earn, read from the question itself."""
    larger = max(re.findall(r"\d+", line["question"]), key=int)
    if not re.match(rf"\D*{larger}(?!\d)", line["answer"]):
        return 0.0
    return 1.0 if line["answer"].strip() == larger else 0.5


def test_distillation_learns_the_reasoning_of_the_teacher(run: Run) -> None:
    output = run("distill", *MODEL, "--steps", "80", "--learning-rate", "0.004")
    before, after = moved(output, "held-out loss")
    assert after < 0.3 * before
    before, after = moved(output, "thinks first")
    assert (before, after > 0.5) == (0.0, True)
    before, after = moved(output, "right answers")
    assert after > before


def test_two_tenants_are_isolated(run: Run, server: LocalServer) -> None:
    keys = ("--api-key", server.new_key("ada"), "--other-key", server.new_key("bob"))
    output = run(
        *("multi_tenant", *MODEL, "--steps", "25", "--learning-rate", "0.004"),
        *("--base-url", server.ready(), *keys),
    )
    for name in ("ada", "bob"):
        before, after = moved(output, f"{name} loss")
        assert after < 0.3 * before
    assert "'I am Ada, the sailor.'" in output
    assert "'I am Bob, the baker.'" in output
    assert "ada cannot see the checkpoint of bob" in output
    assert "2 of 2 clients gave their own answers" in output


def test_killed_run_resumes_with_the_same_losses(run: Run) -> None:
    output = run("resume", *MODEL, "--steps", "8", "--save-every", "2")
    assert "killed after step 5; the last checkpoint is of step 4" in output
    assert "largest difference from an uninterrupted run: 0.000000" in output
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert len(rows) == 8
    assert all(alone == resumed for alone, resumed in rows)
    before, after = moved(output, "loss")
    assert after < before


def test_ctrl_c_prints_one_sentence(server: LocalServer, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(endless(name, server, tmp_path)) for name in INTERRUPTED
        }
        for process in running.values():
            wait_for_bar(process)
        for process in running.values():
            process.send_signal(signal.SIGINT)
        ends = {
            name: process.communicate(timeout=TIMEOUT_SECONDS) for name, process in running.items()
        }
    assert [process.returncode for process in running.values()] == [130] * len(running), ends
    for _, errors in ends.values():
        # What else comes is only how far it came meanwhile.
        log_text = [line for line in errors.splitlines() if line and not BAR.search(line)]
        assert log_text == ["Stopped by Ctrl-C; saved checkpoints are not affected."]


@contextlib.contextmanager
def endless(name: str, server: LocalServer, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """An example that does not end by itself; it is gone after the block."""
    with subprocess.Popen(
        command(name, *MODEL, "--steps", "1000000"),
        env=surroundings(server.home.root),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_bar(process: subprocess.Popen[str]) -> None:
    """Until it is in the middle of training."""
    assert process.stderr is not None
    assert any(BAR.search(line) for line in process.stderr)


@pytest.mark.parametrize(
    ("name", "variable"), [("sft", "TINKER_BASE_URL"), ("resume", "TINKEX_BASE_URL")]
)
def test_unreachable_server_is_reported_in_one_sentence(
    tmp_path: Path, name: str, variable: str
) -> None:
    with socket.socket() as closed:
        # It is bound and does not listen, so nobody else can be there.
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        url = {variable: f"http://127.0.0.1:{port}", "TINKER_API_KEY": "tml-none"}
        done = subprocess.run(
            command(name),
            env=surroundings(tmp_path, **url),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    assert done.returncode == 1
    assert f"Error: Connection error: cannot reach 127.0.0.1:{port}" in done.stderr
    assert "Check base_url and that the server is running." in done.stderr
    assert "Traceback" not in done.stderr


def test_every_local_example_is_tested() -> None:
    users = {path.stem for path in EXAMPLES.glob("*.py") if "from connection" in path.read_text()}
    assert users == set(NAMES)


def test_first_block_of_the_readme_runs(server: LocalServer, tmp_path: Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    code = readme.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=surroundings(server.home.root),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[0]) for line in done.stdout.splitlines()[:10]]
    assert losses[-1] < losses[0]


ASK = """
import sys

import tinkex

with tinkex.ServiceClient() as service:
    training = service.create_lora_training_client("mine", rank=4)
    print("created", flush=True)
    sys.stdin.readline()
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    print(training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
"""


def test_running_server_picks_up_added_and_removed_models(
    server: LocalServer, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "mine", vocab_size=259)
    surrounded = surroundings(server.home.root)

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            env=surrounded,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    refused = python("-c", ASK)
    assert "'mine' cannot be trained here; available: tinkex/tiny" in refused.stderr
    assert "`tinkex model add mine`" in refused.stderr
    added = python("-m", "tinkex", "model", "add", "mine", str(folder))
    assert "now serves it" in added.stderr
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=surrounded,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "created\n"
        removed = python("-m", "tinkex", "model", "remove", "mine")
        assert "no longer serves it" in removed.stderr
        assert "cannot be trained here" in python("-c", ASK).stderr
        # What began on it goes on.
        out, _ = training.communicate("\n", timeout=TIMEOUT_SECONDS)
    assert float(out) > 0.0
