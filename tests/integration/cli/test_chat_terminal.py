"""`tinkex chat` in a separate process on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import KEY, Serve
from tests.support.tiny_model_folders import save_tokenizer
from tinkex.models import TINY_FOLDER
from tinkex.testing import Fault, StubServer, say, scripted_model

#: Generous, because importing transformers is slow.
TIMEOUT_SECONDS = 180.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A process on a pseudo-terminal; records its output."""

    def __init__(self, *words: str, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._written = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            # Ctrl-C reaches the process only if this is its own terminal.
            preexec_fn=lambda: _own_terminal(theirs),
        )
        os.close(theirs)

    @property
    def seen(self) -> str:
        """The decoded output; an escape sequence or character may arrive in two parts."""
        return _ESCAPES.sub("", self._written.decode(errors="replace"))

    def type(self, text: str) -> None:
        """Type a text; the terminal echoes it."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until a text was written `times` times."""
        ends_at = time.monotonic() + TIMEOUT_SECONDS
        while self.seen.count(text) < times:
            self._read(text, ends_at)

    def wait_for_prompt_after(self, text: str) -> None:
        """Wait until `text` and then a prompt were written.

        Only then is a control character a key press: between two prompts the terminal is in
        line mode, and a Ctrl-D that arrives there turns into a NUL when the prompt opens.
        """
        ends_at = time.monotonic() + TIMEOUT_SECONDS
        while "> " not in self.seen.partition(text)[2]:
            self._read(f"{text} and a prompt", ends_at)

    def _read(self, wanted: str, ends_at: float) -> None:
        assert time.monotonic() < ends_at, f"no {wanted!r} in {self.seen!r}"
        if not select.select([self._ours], [], [], 0.5)[0]:
            return
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            data = b""
        assert data, f"it ended without {wanted!r}: {self.seen!r}"
        self._written += data

    def ended(self) -> int:
        """Wait for the exit code."""
        return self.process.wait(TIMEOUT_SECONDS)

    def close(self) -> None:
        """Kill the process and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _own_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@pytest.fixture
def server(serve: Serve) -> StubServer:
    """A server that does not stream: replies are requested in chunks."""
    return serve(api_keys={KEY}, dialect="training-only")


@pytest.fixture
def terminal(server: StubServer, tmp_path: Path) -> Iterator[Terminal]:
    save_tokenizer(tmp_path / "tokenizer", 259)
    with open_chat(server, tmp_path / "tokenizer", "8") as opened:
        yield opened


@contextmanager
def open_chat(server: StubServer, tokenizer: Path, max_tokens: str) -> Iterator[Terminal]:
    words = ("chat", "--tokenizer", str(tokenizer), "--max-tokens", max_tokens)
    where = ("--base-url", server.url, "--api-key", KEY)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm", "PYTHONWARNINGS": "ignore"}
    with closing(Terminal(*words, *where, env=env)) as opened:
        yield opened


def last_message(server: StubServer, folder: Path) -> str:
    """Return the last user message of the newest sample request."""
    from transformers import AutoTokenizer

    tokens = json.loads(server.calls("asample")[-1].body)["prompt"]["chunks"][0]["tokens"]
    text = str(AutoTokenizer.from_pretrained(folder).decode(tokens))
    return text.rpartition("User: ")[2].partition("\n\nAssistant:")[0]


def test_interactive_chat_session(server: StubServer, terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("Chatting with tinkex/bigram; /help lists the commands.")
    terminal.wait_for("> ")

    terminal.type("/help\n")
    terminal.wait_for_prompt_after("Ctrl-C stops a reply.")

    server.inject("asample", Fault(delay_seconds=120.0), times=None)
    terminal.type("first line\nsecond line\n")
    server.wait_for("asample", timeout=TIMEOUT_SECONDS)
    assert last_message(server, tmp_path / "tokenizer") == "first line\nsecond line"

    terminal.type("\x03")
    terminal.wait_for_prompt_after("(stopped)")
    server.clear_faults()

    terminal.type("go \\\non\n")
    terminal.wait_for_prompt_after("(cut off after 8 tokens; --max-tokens allows more)")
    assert terminal.process.poll() is None

    terminal.type("\x04")
    assert terminal.ended() == 0
    assert len(server.calls("finish_session")) == 1


def test_ctrl_c_cancels_a_streamed_reply_on_the_server(serve: Serve) -> None:
    server = serve(api_keys={KEY}, models=[scripted_model()], seconds_per_token=0.05)
    answer = "one two three four five six seven eight nine ten " * 20
    with open_chat(server, TINY_FOLDER, "1000") as terminal:
        terminal.wait_for_prompt_after("/help lists the commands.")
        terminal.type(f"{say(answer)}\n")
        # The reply appears in parts, after the echo of the line.
        terminal.wait_for("\rone two")
        terminal.type("\x03")
        terminal.wait_for_prompt_after("(stopped)")
        assert wait_for_end_of_sample(server) == "the request was cancelled"

        terminal.type(f"{say('Good day.')}\n")
        terminal.wait_for_prompt_after("\rGood day.")
        terminal.type("\x04")
        assert terminal.ended() == 0
    assert server.calls("asample") == []


def wait_for_end_of_sample(server: StubServer) -> str | None:
    """Wait for the end of the only sample, much less than it would take; return its error."""
    ends_at = time.monotonic() + 5.0
    with server._open_database() as database:
        while time.monotonic() < ends_at:
            rows = database.read(lambda db: db.exec_driver_sql(ERRORS).all())
            if rows and rows[0][0] == "failed":
                return str(rows[0][1])
            time.sleep(0.02)
    raise AssertionError("the sample goes on")


ERRORS = "SELECT state, error FROM jobs"
