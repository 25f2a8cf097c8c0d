"""`tinkex chat` and `tinkex sample` with a server that streams."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.integration.cli.conftest import RunCli
from tests.integration.conftest import BASE_MODEL, KEY, Serve
from tests.support.byte_tokenizer_cli import context_for
from tinkex.cli.context import Context, Screen
from tinkex.testing import StubServer

SEEDED = ("--max-tokens", "40", "--temperature", "1", "--seed", "5")


@pytest.fixture
def server(serve: Serve) -> StubServer:
    return serve(api_keys={KEY}, seconds_per_token=0.002)


@pytest.fixture
def context(server: StubServer) -> Context:
    return context_for(server.url)


def streamed(server: StubServer) -> list[dict[str, Any]]:
    """The requests for streams."""
    return [json.loads(call.body) for call in server.calls() if call.path == "/v1/completions"]


def test_a_streamed_sample_is_the_same_as_one_in_one_piece(
    server: StubServer, context: Context, tinkex: RunCli
) -> None:
    words = ("sample", "--prompt", "hel", *SEEDED)
    whole = tinkex(*words, "--json", context=context).json["sequences"][0]
    assert len(server.calls("asample")) == 1
    result = tinkex(*words, context=context)
    assert (result.exit_code, result.out) == (0, whole["text"] + "\n")
    assert len(server.calls("asample")) == 1
    (request,) = streamed(server)
    assert (request["prompt"], request["seed"]) == (list(b"hel"), 5)
    num_tokens = len(whole["tokens"])
    assert result.err.splitlines()[0].startswith("Sampling 1 sample of up to 40 tokens from ")
    assert f"Done: {num_tokens} tokens in" in result.err


@pytest.mark.parametrize(
    "words", [("--num-samples", "2"), ("--logprobs",), ("--stop", "x"), ("--json",), ("-o", "a")]
)
def test_other_outputs_of_samples_are_not_streamed(
    words: tuple[str, ...],
    server: StubServer,
    context: Context,
    tinkex: RunCli,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = tinkex("sample", "--prompt", "hel", *SEEDED, *words, context=context)
    assert result.exit_code == 0, result.err
    assert streamed(server) == []


def test_a_server_that_does_not_stream(serve: Serve, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY}, dialect="training-only")
    words = ("sample", "--prompt", "hel", *SEEDED)
    shown = tinkex(*words, context=context_for(server.url))
    whole = tinkex(*words, "--json", context=context_for(server.url)).json
    assert (shown.exit_code, shown.out) == (0, whole["sequences"][0]["text"] + "\n")


def test_replies_of_a_chat_are_streamed(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    result = tinkex("chat", BASE_MODEL, *SEEDED, "--json", context=context)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["message"] for row in rows] == ["one", "two"]
    assert result.err == ""
    requests = streamed(server)
    assert len(requests) == 2
    assert bytes(requests[0]["prompt"]) == b"User: one\n\nAssistant:"
    assert server.calls("asample") == []
    whole = tinkex("sample", "--chat", "--prompt", "one", *SEEDED, "--json", context=context).json[
        "sequences"
    ][0]["text"]
    assert whole.lstrip().startswith(rows[0]["text"])
    assert rows[0]["text"]


def test_text_appears_while_it_is_generated(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []

    def record(text: str, screen: Screen) -> None:
        parts.append(text)

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    monkeypatch.setattr("tinkex.cli.commands.chat.session.print_part", record)
    monkeypatch.setattr("tinkex.cli.commands.run.streamed_sample.print_part", record)
    tinkex("chat", BASE_MODEL, *SEEDED, context=context)
    assert len(parts) > 3
    parts.clear()
    tinkex("sample", "--prompt", "hel", *SEEDED, context=context)
    assert len(parts) > 3
