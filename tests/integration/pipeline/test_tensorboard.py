"""The TensorBoard server: start, reuse, busy ports and stop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pipeline.tiny_stage import TinyStage, make_plan
from tinkex.pipeline.train.loop import train
from tinkex.pipeline.train.metrics import make_sink
from tinkex.pipeline.train.tensorboard import RECORD_FILE, TensorBoard, start_tensorboard

pytest.importorskip("tensorboard", reason="tensorboard is not installed: tinkex[pipeline] has it")


def fetch(url: str, path: str = "data/environment") -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as reply:
        return json.load(reply)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def start(logdir: Path, port: int = 0) -> TensorBoard:
    server = start_tensorboard(logdir, port=port)
    assert server is not None
    return server


def test_server_answers_and_stops_after_the_block(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        assert fetch(server.url)["data_location"] == str(tmp_path)
        url, pid = server.url, server.pid
        # A second run with the same directory reuses the server and does not stop it.
        program = (
            "import sys; from pathlib import Path\n"
            "from tinkex.pipeline.train.tensorboard import start_tensorboard\n"
            "server = start_tensorboard(Path(sys.argv[1]))\n"
            "print(server.url, server.pid, server.is_reused); server.stop()"
        )
        command = [sys.executable, "-c", program, str(tmp_path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert output.stdout.split() == [url, str(pid), "True"]
        assert fetch(url)
    with pytest.raises(urllib.error.URLError):
        fetch(url)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (tmp_path / RECORD_FILE).exists()


def test_busy_port_is_replaced_by_a_free_one(tmp_path: Path, busy_port: int) -> None:
    with start(tmp_path, busy_port) as server:
        assert f":{busy_port}/" not in server.url
        assert fetch(server.url)["data_location"] == str(tmp_path)


def test_server_of_a_dead_run_is_taken_over(tmp_path: Path) -> None:
    first = start(tmp_path)
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / RECORD_FILE).write_text(json.dumps({**record, "owner": gone.pid}))
    second = start(tmp_path)
    assert (second.pid, second.is_reused) == (first.pid, False)
    first.stop()
    second.stop()
    with pytest.raises(urllib.error.URLError):
        fetch(second.url)


def test_record_of_a_stopped_server_is_ignored(tmp_path: Path) -> None:
    record = {"url": "http://127.0.0.1:9/", "pid": os.getpid(), "owner": os.getpid()}
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    with start(tmp_path) as server:
        assert server.pid != os.getpid()


def test_missing_tensorboard_package_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert start_tensorboard(tmp_path) is None
    assert "[pipeline]" in caplog.text


def test_resumed_run_logs_each_point_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = make_plan(
        tmp_path, tensorboard_dir=tmp_path / "tb", schedule="constant", keep_last_checkpoints=9
    )
    train(TinyStage(), plan, sink=make_sink("tiny", plan))
    # Simulate a crash that lost the updates after the fourth.
    plan = replace(plan, resume=str(tmp_path / "checkpoints" / "step_00000004"))
    train(TinyStage(), plan, sink=make_sink("tiny", plan))
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    steps = [point.step for point in found.Scalars("train/loss")]
    assert steps == list(range(1, 13))
    assert [point.step for point in found.Scalars("eval/loss")] == [0, 3, 6, 9, 12]


def test_new_run_purges_old_points(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("first", "second"):
        plan = make_plan(tmp_path / name, tensorboard_dir=tmp_path / "tb")
        train(TinyStage(), plan, sink=make_sink("tiny", plan))
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert [point.step for point in found.Scalars("train/loss")] == list(range(1, 13))
    assert [point.step for point in found.Scalars("eval/loss")] == [0, 3, 6, 9, 12]
