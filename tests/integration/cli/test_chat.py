"""`tinkex chat` against a server: from a pipe, and from a terminal."""

from __future__ import annotations

import io
import json

import pytest

from tests.integration.cli.conftest import RunCli
from tests.integration.conftest import BASE_MODEL, KEY, Serve
from tests.support.byte_tokenizer_cli import context_for
from tinkex.cli.context import Context, Screen
from tinkex.testing import Fault, StubServer

SHORT = ("--max-tokens", "12", "--temperature", "0")


@pytest.fixture
def server(serve: Serve) -> StubServer:
    """A server that does not stream: replies are requested in chunks."""
    return serve(api_keys={KEY}, dialect="training-only")


@pytest.fixture
def context(server: StubServer) -> Context:
    return context_for(server.url)


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def prompts(server: StubServer) -> list[str]:
    """Return the prompt of each reply."""
    seen = []
    for call in server.calls("asample"):
        tokens = json.loads(call.body)["prompt"]["chunks"][0]["tokens"]
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        if text.endswith("Assistant:"):
            seen.append(text)
    return seen


def test_each_line_gets_a_reply_with_history(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one", "", "two")
    result = tinkex("chat", BASE_MODEL, *SHORT, "--system", "be brief", "--json", context=context)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["message"] for row in rows] == ["one", "two"]
    assert {row["stop_reason"] for row in rows} <= {"stop", "length"}
    first, second = prompts(server)
    assert first == "System: be brief\n\nUser: one\n\nAssistant:"
    assert second.startswith("System: be brief\n\nUser: one\n\nAssistant:")
    assert second.endswith("\n\nUser: two\n\nAssistant:")
    assert result.err == "", "a program that reads JSON hears of errors alone"


def test_missing_chat_template_is_reported(
    context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one")
    assert "no chat template" in tinkex("chat", BASE_MODEL, *SHORT, context=context).err


def test_reply_is_streamed_in_chunks(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one")
    result = tinkex("chat", *SHORT, context=context)
    assert result.exit_code == 0, result.err
    asked = [json.loads(call.body) for call in server.calls("asample")]
    sizes = [request["sampling_params"]["max_tokens"] for request in asked]
    assert sizes[0] == 4
    assert sum(sizes) == 12
    tokens = [request["prompt"]["chunks"][0]["tokens"] for request in asked]
    assert all(later[: len(tokens[0])] == tokens[0] for later in tokens)
    assert [len(later) - len(tokens[0]) for later in tokens][1] == 4


def test_slash_commands_work_in_a_pipe(
    server: StubServer,
    context: Context,
    tinkex: RunCli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, "one", "/reset", "/etc/hosts", "//quit", "/quit", "never")
    result = tinkex("chat", *SHORT, "--json", context=context)
    messages = [json.loads(line)["message"] for line in result.out.splitlines()]
    assert messages == ["one", "/etc/hosts", "/quit"]
    assert prompts(server)[1] == "User: /etc/hosts\n\nAssistant:"


def test_error_ends_a_piped_chat(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one", "two")
    server.inject("asample", Fault(status=400), times=None)
    result = tinkex("chat", *SHORT, "--json", context=context)
    assert (result.exit_code, result.out) == (1, "")
    assert len(server.calls("asample")) == 1


def test_interactive_chat_continues_after_error(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one", "/nope", "two")
    server.inject("asample", Fault(status=400), times=1)
    screen = Screen(is_terminal=False, width=80)
    person = context._replace(is_stdin_terminal=True, stdout=screen)
    result = tinkex("chat", *SHORT, context=person)
    assert result.exit_code == 0
    assert "Error: Invalid request" in result.err
    assert "Unknown command /nope; /help lists the commands." in result.err
    assert prompts(server)[-1] == "User: two\n\nAssistant:"


def test_too_long_conversation_is_an_error(
    context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "x" * 100_000)
    result = tinkex("chat", *SHORT, context=context)
    assert result.exit_code == 1
    assert "but the model's context length is" in result.err
    assert "/reset" in result.err


def test_missing_stdin_ends_quietly(
    context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stdin in (None, io.StringIO("")):
        monkeypatch.setattr("sys.stdin", stdin)
        result = tinkex("chat", *SHORT, context=context)
        assert (result.exit_code, result.out) == (0, "")


def test_a_session_is_finished_at_the_end(
    server: StubServer, context: Context, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one")
    tinkex("chat", *SHORT, context=context)
    assert len(server.calls("finish_session")) == 1
