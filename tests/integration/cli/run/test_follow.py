"""`run watch` and `run plot` against a server."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli
from tests.integration.cli.run.conftest import NUM_STEPS, Trained
from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS, Connect, Serve
from tests.support.byte_tokenizer_cli import context_for
from tinkex.cli.commands.run.metrics import fetch_all_steps
from tinkex.cli.context import Screen

QUICK = ("--interval", "20ms")


def test_once_shows_current_state(trained: Trained, tinkex: RunCli) -> None:
    result = tinkex("run", "watch", trained.run_id, "--once", context=trained.context)
    assert result.exit_code == 0
    assert result.out.startswith(f"{trained.run_id}: training, {NUM_STEPS} steps, loss ")
    found = tinkex("run", "watch", trained.run_id, "--once", "--json", context=trained.context).json
    assert (found["step"], found["status"]) == (NUM_STEPS, "active")
    assert found["loss"] > 0
    assert "grad_norm" in found["metrics"]


def test_run_is_followed_until_it_ends(trained: Trained, tinkex: RunCli) -> None:
    def go_on() -> None:
        trained.server.wait_for("get_run_metrics", timeout=TIMEOUT_SECONDS)
        trained.train(3)
        trained.service.close().result(TIMEOUT_SECONDS)

    worker = threading.Thread(target=go_on)
    worker.start()
    result = tinkex("run", "watch", trained.run_id, *QUICK, "--json", context=trained.context)
    worker.join(TIMEOUT_SECONDS)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert result.exit_code == 0
    steps = [row["step"] for row in rows if row["metrics"]]
    assert steps == list(range(1, NUM_STEPS + 4))
    assert rows[-1]["status"] == "finished"
    assert rows[0]["loss"] > rows[NUM_STEPS]["loss"]


def test_finished_run_is_shown_as_lines(finished: Trained, tinkex: RunCli) -> None:
    result = tinkex("run", "watch", finished.run_id, *QUICK, context=finished.context)
    lines = result.out.splitlines()
    assert [line.split()[1] for line in lines] == [str(n) for n in range(1, NUM_STEPS + 1)]
    assert ": finished, " in result.err


def test_ctrl_c_exits_with_130_and_run_continues(
    trained: Trained,
) -> None:
    words = ["run", "watch", trained.run_id, "--base-url", trained.server.url, "--api-key", KEY]
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", *words, *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1 ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "the run continues" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [("watch",), ("plot",)])
def test_server_without_metrics_is_an_error(
    words: tuple[str, ...], serve: Serve, connect: Connect, tinkex: RunCli
) -> None:
    server = serve(api_keys={KEY}, dialect="tuft")
    run_id = connect(server).create_lora_training_client(BASE_MODEL, rank=4).model_id
    context = context_for(server.url)
    result = tinkex("run", *words, run_id, "--json", context=context)
    assert result.exit_code == 1
    assert result.failure["message"] == "This server does not report metrics of training runs"


@pytest.mark.parametrize("words", [("watch",), ("plot",)])
def test_unknown_run_exits_1_with_404(
    words: tuple[str, ...], finished: Trained, tinkex: RunCli
) -> None:
    result = tinkex("run", *words, "nosuch", "--json", context=finished.context)
    assert (result.exit_code, result.failure["status"]) == (1, 404)
    assert "training run 'nosuch'" in result.failure["message"]


def test_plot_prints_chart(finished: Trained, tinkex: RunCli) -> None:
    shown = tinkex("run", "plot", finished.run_id, context=finished.context).out
    assert shown.startswith(f"loss of {finished.run_id}: ")
    assert any("⠀" < letter <= "⣿" for letter in shown)
    found = tinkex("run", "plot", finished.run_id, "--json", context=finished.context).json
    assert [point["step"] for point in found["points"]] == list(range(1, NUM_STEPS + 1))
    values = [point["value"] for point in found["points"]]
    assert values[0] > values[-1]


def test_all_pages_are_fetched(trained: Trained) -> None:
    told: list[tuple[int, int]] = []
    client = trained.service.rest_client()
    _, steps = fetch_all_steps(
        client, trained.run_id, lambda result, total: told.append((result, total)), 2
    )
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    asked = [int(call.query["after"]) for call in trained.server.calls("get_run_metrics")]
    assert (asked[0], len(set(asked)), asked) == (0, 3, sorted(asked))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_only_the_latest_steps_are_shown_at_first(finished: Trained, tinkex: RunCli) -> None:
    words = ("run", "watch", finished.run_id, *QUICK, "--last", "2")
    shown = tinkex(*words, context=finished.context).out
    assert [line.split()[1] for line in shown.splitlines()] == ["4", "5"]


def test_terminal_shows_live_view(finished: Trained, tinkex: RunCli) -> None:
    screen = Screen(is_terminal=True, width=80)
    person = finished.context._replace(stdout=screen)
    shown = tinkex("run", "watch", finished.run_id, *QUICK, context=person).out
    assert finished.run_id in shown
    assert "finished, 5 steps" in shown
    assert any("⠀" < letter <= "⣿" for letter in shown)


@pytest.mark.parametrize("name", ["a.csv", "a.svg", "A.SVG", "a.png"])
def test_plot_files_are_written(
    name: str, finished: Trained, tinkex: RunCli, tmp_path: Path
) -> None:
    path = tmp_path / name
    words = ("run", "plot", finished.run_id, "-o", str(path))
    assert tinkex(*words, context=finished.context).out == ""
    if path.suffix == ".csv":
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert [row["step"] for row in rows] == [str(n) for n in range(1, NUM_STEPS + 1)]
    elif path.suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
    else:
        assert path.read_text().startswith("<svg ")
    found = tinkex(*words, "--json", context=finished.context).json
    assert (found["output"], found["num_steps"]) == (str(path), NUM_STEPS)


def test_unknown_metric_and_file_type_errors(finished: Trained, tinkex: RunCli) -> None:
    words = ("run", "plot", finished.run_id)
    result = tinkex(*words, "--metric", "beauty", context=finished.context)
    assert result.exit_code == 1
    assert "no metric 'beauty'" in result.err
    assert "grad_norm" in result.err
    assert tinkex(*words, "--metric", "grad_norm", "--json", context=finished.context).json[
        "points"
    ]
    result = tinkex(*words, "-o", "a.gif", context=finished.context)
    assert (result.exit_code, result.out) == (2, "")
    assert ".png, .svg or .csv" in result.err
