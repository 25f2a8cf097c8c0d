"""Models of the Hub: from the cache, or downloaded from a fake Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import TIMEOUT_SECONDS
from tests.support.http_server import SmallServer
from tests.support.model_folder_files import CONFIG, NUM_PARAMETERS, safetensors
from tinkex.engine.models.hub_download import Hub
from tinkex.engine.models.registry import locate_model_folder
from tinkex.engine.models.weight_files import UnusableModel

NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/small"
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": safetensors(),
    "pytorch_model.bin": b"the same weights once more",
    "onnx/model.onnx": b"and once more",
}


class FakeHub(SmallServer):
    """The part of the Hub API that a download needs; records the downloaded files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.status = 200
        self.fetched: list[str] = []
        self.stuck: str | None = None
        """A file whose response is delayed until `released` is set, and is then 404."""
        self.released = threading.Event()
        super().__init__(_Handler)

    def answer(self, path: str) -> Any:
        """The JSON response for an API path; None if the path is a file."""
        if "/resolve/" in path:
            return None
        if "/tree/" in path:
            return [self._entry(name) for name in self.files]
        siblings = [{"rfilename": name, "size": len(self.files[name])} for name in self.files]
        return {"id": MODEL, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if self.hub.status != 200:
            error = {401: "RepoNotFound", 403: "GatedRepo"}[self.hub.status]
            return self._send(self.hub.status, b"{}", {"X-Error-Code": error})
        found = self.hub.answer(path)
        if found is not None:
            return self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        name = path.partition("/resolve/")[2].partition("/")[2]
        content = self.hub.files[name]
        if self.command == "GET":
            self.hub.fetched.append(name)
            if name == self.hub.stuck:
                self.hub.released.wait(TIMEOUT_SECONDS)
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        tag = hashlib.sha1(content).hexdigest()
        return self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Suppress the log."""


@pytest.fixture
def fake_hub() -> Iterator[Callable[..., FakeHub]]:
    """Starts fake Hubs that stop with the test."""
    made: list[FakeHub] = []

    def start(files: dict[str, bytes] = FILES) -> FakeHub:
        made.append(FakeHub(dict(files)))
        return made[-1]

    yield start
    for hub in made:
        hub.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def unreachable(cache: Path) -> Hub:
    return Hub("http://127.0.0.1:9", cache)


def test_model_is_downloaded_once(
    fake_hub: Callable[..., FakeHub], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    server = fake_hub()
    found = Hub(server.url, cache).find(MODEL)
    assert found.weights.num_parameters == NUM_PARAMETERS
    assert sorted(set(server.fetched)) == list(NEEDED)
    assert "not in the Hugging Face cache: downloading it" in caplog.text
    server.fetched.clear()
    assert unreachable(cache).find(MODEL) == found
    assert unreachable(cache).find_cached(MODEL) == found
    assert server.fetched == []


def test_full_disk_is_reported_before_download(
    fake_hub: Callable[..., FakeHub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_hub()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(UnusableModel, match=f"'{MODEL}' needs .* but only 10 B are free in"):
        Hub(server.url, cache).find(MODEL)
    assert server.fetched == []


def test_pickles_are_downloaded_without_safetensors(
    fake_hub: Callable[..., FakeHub], cache: Path
) -> None:
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    found = Hub(fake_hub(files).url, cache).find(MODEL)
    assert found.weights.format == "pickle"


def test_incomplete_download_is_completed(fake_hub: Callable[..., FakeHub], cache: Path) -> None:
    server = fake_hub()
    found = Hub(server.url, cache).find(MODEL)
    (found.path / "model.safetensors").resolve().unlink()
    (found.path / "model.safetensors").unlink()
    with pytest.raises(UnusableModel, match=r"has no weights.*and the Hub cannot be reached"):
        unreachable(cache).find(MODEL)
    assert Hub(server.url, cache).find(MODEL) == found


def test_unusable_model_is_not_downloaded(fake_hub: Callable[..., FakeHub], cache: Path) -> None:
    config = json.dumps(CONFIG | {"architectures": ["BertForMaskedLM"]}).encode()
    server = fake_hub(FILES | {"config.json": config})
    for _ in range(2):
        with pytest.raises(UnusableModel, match="which is not a causal language model"):
            Hub(server.url, cache).find(MODEL)
    assert "model.safetensors" not in server.fetched


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "the Hub does not have it"), (403, "is gated")],
)
def test_unavailable_hub_model_message(
    fake_hub: Callable[..., FakeHub], cache: Path, status: int, words: str
) -> None:
    server = fake_hub()
    server.status = status
    with pytest.raises(UnusableModel, match=words) as refused:
        Hub(server.url, cache).find(MODEL)
    assert MODEL in refused.value.message
    assert "hf auth login" in (refused.value.hint or "")


def test_no_network_message(cache: Path) -> None:
    with pytest.raises(UnusableModel) as refused:
        unreachable(cache).find(MODEL)
    message = refused.value.message
    assert (
        "is not a local folder and not in the Hugging Face cache, and the Hub cannot be reached"
        in message
    )
    assert "\n" not in message
    with pytest.raises(UnusableModel, match="not in the Hugging Face cache"):
        unreachable(cache).find_cached(MODEL)


@pytest.mark.parametrize("location", ["a b", "a/b/c", "-x", "x" * 200])
def test_invalid_model_id_message(cache: Path, location: str) -> None:
    with pytest.raises(UnusableModel, match="neither a local folder nor a model id"):
        Hub(cache=cache).find(location)


def test_path_is_never_looked_up_on_hub(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=f"folder {tmp_path / 'x'} does not exist"):
        locate_model_folder(str(tmp_path / "x"))


def test_download_progress_is_logged(
    fake_hub: Callable[..., FakeHub],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    monkeypatch.setattr("tinkex.engine.models.hub_download.LOG_INTERVAL_SECONDS", 0.02)
    Hub(fake_hub().url, cache).find(MODEL)
    assert re.search(rf"model '{MODEL}': \d+ B of \d+ B", caplog.text)


def test_a_progress_bar_replaces_the_log(
    fake_hub: Callable[..., FakeHub],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "tinkex")
    monkeypatch.setattr("tinkex.engine.models.hub_download.PROGRESS_INTERVAL_SECONDS", 0.02)
    progress: list[tuple[int, int]] = []
    Hub(fake_hub().url, cache, lambda *figures: progress.append(figures)).find(MODEL)
    num_bytes = sum(map(len, (FILES[name] for name in NEEDED)))
    assert {total for _, total in progress} == {num_bytes}
    assert all(0 <= done <= num_bytes for done, _ in progress)
    assert " B of " not in caplog.text


def test_interrupted_download_keeps_complete_files(
    fake_hub: Callable[..., FakeHub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_hub()
    server.stuck = "model.safetensors"
    monkeypatch.setattr("tinkex.engine.models.hub_download.PROGRESS_INTERVAL_SECONDS", 0.02)

    def interrupt(done: int, total: int) -> None:
        if server.stuck in server.fetched:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            Hub(server.url, cache, interrupt).find(MODEL)
    finally:
        server.stuck = None
        server.released.set()
    # Only files remain that the next download uses.
    assert sorted(file.suffix for file in cache.rglob("blobs/*")) == ["", ""]
    assert Hub(server.url, cache).find(MODEL).weights.num_parameters == NUM_PARAMETERS


def test_download_process_error_is_reported(
    fake_hub: Callable[..., FakeHub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_hub()
    server.stuck = "model.safetensors"
    server.released.set()
    with pytest.raises(UnusableModel, match=r"could not be downloaded: \S+") as failed:
        Hub(server.url, cache).find(MODEL)
    assert failed.value.hint == "Try again; complete files are not downloaded again."
