"""The examples do what they claim, on a server of this machine that they find by themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.acceptance.engine.servers import VOCAB_SIZE, LocalServer
from tests.integration.engine.folders import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Nothing here takes this long; it only says that nothing hangs.
PATIENCE = 240.0


class Run(Protocol):
    """Runs an example to its end and returns what it printed."""

    def __call__(self, name: str, *options: str) -> str: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server of one tiny model with random weights."""
    directory = tmp_path_factory.mktemp("examples")
    folder = save_tiny(directory / "tiny", vocab_size=VOCAB_SIZE)
    server = LocalServer(directory / "home", {"tiny": folder})
    try:
        server.ready()
        yield server
    finally:
        server.end()


@pytest.fixture
def run(server: LocalServer, tmp_path: Path) -> Run:
    """With no address and no key: only the home is told."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TINKE")}
    told = {
        "TINKEX_HOME": str(server.home.root),
        "TINKER_TELEMETRY": "0",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def run(name: str, *options: str) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
            env=kept | told,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.said[-3000:]}"
        assert "Traceback" not in done.stderr
        # Somebody who watches sees how far it is.
        assert re.search(r"\d+/\d+ \|#+ *\| \w+ \d", done.stderr)
        return done.stdout

    return run


def moved(output: str, name: str) -> tuple[float, float]:
    """A figure before and after, from a line such as `loss 2.000 -> 1.000`."""
    found = re.search(rf"^{name} (-?[\d.]+) -> (-?[\d.]+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


def test_sft_learns_the_answers(run: Run) -> None:
    output = run("sft", "--steps", "40", "--learning-rate", "0.003")
    before, after = moved(output, "loss")
    assert after < 0.4 * before
    assert "tinker://" in output


def test_dpo_learns_the_preference(run: Run) -> None:
    output = run("dpo", "--steps", "10", "--learning-rate", "0.002", "--base-model", "tiny")
    before, after = moved(output, "loss")
    assert before == pytest.approx(0.693, abs=1e-3)
    assert after < 0.5 * before
    assert moved(output, "margin")[1] > 1.0
    assert "gained more in 6 of 6 pairs" in output


def test_grpo_earns_more_reward(run: Run) -> None:
    output = run("grpo", "--steps", "30", "--learning-rate", "0.003", "--group-size", "48")
    before, after = moved(output, "reward")
    assert after > 2 * before


def test_distillation_learns_the_thoughts_of_the_teacher(run: Run) -> None:
    output = run("distill", "--steps", "60", "--learning-rate", "0.004")
    before, after = moved(output, "held-out loss")
    assert after < 0.3 * before
    assert moved(output, "thinks first")[1] > 0.5


def test_two_tenants_do_not_disturb_each_other(run: Run, server: LocalServer) -> None:
    keys = ("--api-key", server.new_key("ada"), "--other-key", server.new_key("bob"))
    output = run(
        *("multi_tenant", "--steps", "40", "--learning-rate", "0.003"),
        *("--base-url", server.ready(), *keys),
    )
    for name in ("ada", "bob"):
        before, after = moved(output, f"{name} loss")
        assert after < 0.3 * before
    assert "'I am Ada, the sailor.'" in output
    assert "'I am Bob, the baker.'" in output
    assert "ada cannot see the checkpoint of bob" in output


def test_a_killed_run_ends_with_the_losses_of_an_undisturbed_one(run: Run) -> None:
    output = run("resume", "--steps", "8", "--save-every", "2")
    assert "killed after step 5" in output
    assert "largest difference from a run that was left alone: 0.000000" in output
    before, after = moved(output, "loss")
    assert after < before


def test_all_examples_of_this_machine_are_run_here() -> None:
    users = {path.stem for path in EXAMPLES.glob("*.py") if "from connection" in path.read_text()}
    assert users == {"sft", "dpo", "grpo", "distill", "multi_tenant", "resume"}
