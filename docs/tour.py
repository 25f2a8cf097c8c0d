"""The output of commands for docs/cli/tour.md, recorded on a terminal of 80 columns.

Ids, times and speeds differ from run to run; constants replace them, so the page stays the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tinkex import ServiceClient
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import run
from tinkex.client.config import Config
from tinkex.engine.fake.toy_tokenizer import toy_tokenizer

READY = "tinkex server ready at "
WIDTH = 80
ROWS = (
    ("Where does the sun rise?", "In the east."),
    ("Where does the sun set?", "In the west."),
    ("What is above us?", "The sky."),
)
TRAIN = "train sft data/sft.jsonl --base-model tinkex/bigram --name sun --steps 10 --save-every 5"
DELETE = "checkpoint delete tinker://latest/weights/sun-000005"
#: The parts of the page, each with its commands; a command may be followed by what is typed.
SCENES: dict[str, tuple[tuple[str, str], ...]] = {
    "help": (("--help", ""),),
    "train": ((f"{TRAIN} --learning-rate 0.3 --sample-tokens 12", ""),),
    "runs": (("run list", ""), ("run info latest", ""), ("run watch latest --once", "")),
    "rename": (("run rename latest 'sunrise, rank 32'", ""), ("run list --search sunrise", "")),
    "checkpoints": (("checkpoint list --limit 2", ""), ("checkpoint info latest", "")),
    "plot": (("run plot latest", ""),),
    "sample": (("sample --model-path latest --prompt 'Where ' --max-tokens 24 --seed 1", ""),),
    "delete": ((DELETE, "n\n"),),
    "errors": (
        ("run info tomorrow", ""),
        ("run plot latest --metric accuracy", ""),
        ("checkpoint list --limit many", ""),
    ),
    "create": (("checkpoint --base-model tinkex/bigram --output made.json --rank 8", ""),),
}
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_UNSTABLE = (
    (re.compile(r" --base-url http\S+"), ""),
    (re.compile(r"[\d,]+ tokens/s"), "9,600 tokens/s"),
    (re.compile(r"(runs/\w+-)[0-9a-f]{12}"), r"\g<1>cd464c0764cc"),
    (re.compile(r"\b(\d+\.\ds|\d+ms)\b"), "0.1s"),
)


class Utf8Text(io.StringIO):
    """A stream that accepts every character, as terminals do."""

    encoding = "utf-8"


class Transcript:
    """Runs command lines against one server and records their output."""

    def __init__(self, url: str, key: str) -> None:
        self._context = Context(
            base_url=url,
            api_key=key,
            stdout=Screen(is_terminal=True, width=WIDTH),
            stderr=Screen(width=WIDTH),
            make_service=_make_service,
        )
        self._ids: dict[str, str] = {}

    def show(self, line: str, typed: str) -> str:
        """A command line with its stdout and stderr."""
        shown, context = Utf8Text(), self._context
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(shown))
            stack.enter_context(contextlib.redirect_stderr(shown))
            if typed:
                stack.enter_context(mock.patch("sys.stdin", io.StringIO(typed)))
                context = context._replace(is_stdin_terminal=True)
            run(shlex.split(line), context)
        return self._stable(f"$ tinkex {line}\n{shown.getvalue().rstrip()}")

    def _stable(self, text: str) -> str:
        for pattern, replacement in _UNSTABLE:
            text = pattern.sub(replacement, text)
        text = _UUID.sub(lambda match: self._id(match[0]), text)
        # A short id is the beginning of a full one.
        for found, stable in self._ids.items():
            text = text.replace(found[:8], stable[:8])
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _id(self, found: str) -> str:
        digest = hashlib.sha256(f"tour {len(self._ids)}".encode()).digest()[:16]
        return self._ids.setdefault(found, str(uuid.UUID(bytes=digest, version=4)))


def _make_service(config: Config) -> ServiceClient:
    return ServiceClient(config=config.evolve(tokenizer_loader=lambda name: toy_tokenizer()))


@contextlib.contextmanager
def _server(home: Path) -> Iterator[tuple[str, str]]:
    """A server with the practice engine, and its key."""
    command = [sys.executable, "-m", "tinkex", "serve", "--home", str(home), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--engine", "fake"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            line = process.stdout.readline()
            assert line.startswith(READY), line
            yield line.removeprefix(READY).strip(), (home / "key").read_text().strip()
        finally:
            process.terminate()


def record() -> dict[str, str]:
    """Every part of the page as Markdown, by name."""
    with tempfile.TemporaryDirectory() as place, _server(Path(place) / "home") as (url, key):
        before = Path.cwd()
        os.chdir(place)
        try:
            Path("data").mkdir()
            rows = [json.dumps({"prompt": ask, "completion": answer}) for ask, answer in ROWS]
            Path("data/sft.jsonl").write_text("\n".join(rows) + "\n")
            transcript = Transcript(url, key)
            return {
                name: "\n\n".join(f"```text\n{transcript.show(*line)}\n```" for line in lines)
                for name, lines in SCENES.items()
            }
        finally:
            os.chdir(before)
