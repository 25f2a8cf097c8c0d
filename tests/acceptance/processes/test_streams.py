"""Streams of real processes: workers and API processes are killed while clients read."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import TIMEOUT_SECONDS, ServeProcess, eventually
from tinkex.engine.fake.scripted import SCRIPTED, say, scripted_model

#: A token per 20 ms, so that an answer takes long enough to be interrupted.
ENVIRONMENT = {"TINKEX_FAKE_TOKEN_SECONDS": "0.02", "TINKEX_MODELS": scripted_model()}
TEXT = " ".join(f"word {number}," for number in range(50))
#: An answer that takes minutes.
ENDLESS_TEXT = "again and " * 2000
MAX_ATTEMPTS = 5


class Stream:
    """A streamed completion, read as a client without a library would."""

    def __init__(self, server: ServeProcess, url: str, text: str = TEXT) -> None:
        body = {"model": SCRIPTED, "prompt": say(text), "max_tokens": 8000, "stream": True}
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        parts = urlsplit(url)
        for _ in range(MAX_ATTEMPTS):
            self.connection = http.client.HTTPConnection(
                parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS
            )
            self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
            self.response = self.connection.getresponse()
            if self.response.status == 200:
                break
            answer = self.response.read()
            self.close()
            # As clients do: on a busy machine the server may ask to try again.
            assert self.response.status == 503, answer
        else:
            pytest.fail(f"no stream in {MAX_ATTEMPTS} attempts: {answer!r}")
        self.id = self.response.headers["x-request-id"]
        self.chunks: list[str] = []

    def events(self) -> Iterator[dict[str, Any]]:
        """The events until the last one."""
        for line in self.response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data and not data.startswith(":"):
                yield json.loads(data)

    def read(self, num_chunks: int | None = None) -> str:
        """Read so many parts of the text, or all; return the text until now."""
        for event in self.events():
            assert "error" not in event, event
            self.chunks += [choice["text"] for choice in event["choices"] if choice["text"]]
            if num_chunks is not None and len(self.chunks) >= num_chunks:
                break
        return "".join(self.chunks)

    def close(self) -> None:
        self.connection.close()


def count_finished(server: ServeProcess) -> dict[str, str | None]:
    """The errors of the finished jobs by id; None for those that succeeded."""
    with closing(sqlite3.connect(server.home.store_file)) as db:
        query = "SELECT id, error FROM jobs WHERE finished_at IS NOT NULL"
        return dict(db.execute(query).fetchall())


def test_a_stream_survives_a_killed_worker(serve: Serve, home: Path) -> None:
    server = serve(home, env=ENVIRONMENT)
    with closing(Stream(server, server.ready())) as stream:
        stream.read(5)
        os.kill(server.pids("worker")[-1], signal.SIGKILL)
        assert stream.read() == TEXT
    assert len(stream.chunks) > 15, "it continued before the result was stored"
    assert len(server.pids("worker")) == 2


@pytest.mark.slow  # half a minute until the process counts as gone
def test_requests_of_a_killed_api_process_are_cancelled(serve: Serve, home: Path) -> None:
    server = serve(home, env=ENVIRONMENT)
    url = server.ready()
    stream = Stream(server, url, ENDLESS_TEXT)
    stream.read(3)
    os.kill(server.pids("API")[-1], signal.SIGKILL)
    with suppress(http.client.HTTPException, OSError):
        assert stream.read() != ENDLESS_TEXT
    stream.close()
    # The next API process streams too, while the worker still decodes for the dead one.
    eventually(lambda: len(server.pids("API")) == 2)
    with closing(Stream(server, url)) as other:
        assert other.read() == TEXT
    assert len(other.chunks) > 15
    assert stream.id not in count_finished(server)
    eventually(lambda: "cancelled" in (count_finished(server).get(stream.id) or ""))


def test_a_disconnected_client_frees_its_slot(serve: Serve, home: Path) -> None:
    server = serve(home, env=ENVIRONMENT)
    stream = Stream(server, server.ready(), ENDLESS_TEXT)
    stream.read(3)
    stream.close()
    eventually(lambda: "cancelled" in (count_finished(server).get(stream.id) or ""), 20.0)


def test_streams_of_several_api_processes_and_workers(serve: Serve, home: Path) -> None:
    server = serve(home, "--workers", "2", "--api-processes", "2", env=ENVIRONMENT)
    url = server.ready()
    streams = [Stream(server, url) for _ in range(6)]
    for stream in streams:
        stream.read(3)
    texts = [stream.read() for stream in streams]
    for stream in streams:
        stream.close()
    assert texts == [TEXT] * len(streams)
    assert min(len(stream.chunks) for stream in streams) > 15
