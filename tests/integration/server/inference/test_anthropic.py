"""Anthropic's Messages API through Anthropic's SDK, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import httpx
import pytest

from tests.integration.server.inference.conftest import KEY, TIMEOUT_SECONDS
from tinkex.jobs.token_streams import TokenStream, TokenStreams
from tinkex.testing import SCRIPTED, StubServer, say, scripted_model

BASES = ("", "/anthropic/api")


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    models = ["a/one", "b/two", "c/three", scripted_model()]
    with StubServer(api_keys=[KEY], models=models) as opened:
        yield opened


def connect(server: StubServer, base: str = "", **options: Any) -> anthropic.Anthropic:
    given = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_SECONDS} | options
    return anthropic.Anthropic(base_url=server.url + base, **given)


@pytest.fixture
def client(server: StubServer) -> Iterator[anthropic.Anthropic]:
    with connect(server) as opened:
        yield opened


def question(answer: str, **fields: Any) -> dict[str, Any]:
    """A request to which the scripted model gives this answer."""
    messages = [{"role": "user", "content": f"Hello! {say(answer)}"}]
    return {"model": SCRIPTED, "max_tokens": 64, "messages": messages} | fields


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("credential", ["api_key", "auth_token"])
def test_create(server: StubServer, base: str, credential: str) -> None:
    keys = {"api_key": None, "auth_token": None, credential: KEY}
    with connect(server, base, **keys) as client:
        message = client.messages.create(**question("Good day."))
    assert message.id == f"msg_{message._request_id}"
    assert (message.type, message.role, message.model) == ("message", "assistant", SCRIPTED)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Good day."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 1


def test_only_streams_follow_tokens(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker does not send tokens that no client reads."""
    followed: list[str] = []
    open_stream = TokenStreams.open

    def record(streams: TokenStreams, stream: TokenStream) -> AbstractContextManager[None]:
        followed.append(stream.job_id)
        return open_stream(streams, stream)

    monkeypatch.setattr(TokenStreams, "open", record)
    client.messages.create(**question("Good day."))
    assert followed == []
    with client.messages.stream(**question("Good day.")) as stream:
        stream.until_done()
    assert len(followed) == 1


def test_stream(client: anthropic.Anthropic) -> None:
    request = question("One two three, one two three.")
    with client.messages.stream(**request) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_message()
        assert final.id == f"msg_{stream.request_id}"
    whole = client.messages.create(**request)
    assert types[0] == "message_start"
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == whole.content[0].text
    assert final.usage == whole.usage
    assert final.stop_reason == "end_turn"


def test_bytes_of_a_stream(server: StubServer) -> None:
    reply = httpx.post(
        f"{server.url}/v1/messages",
        json=question("Hi", stream=True, max_tokens=1),
        headers={"x-api-key": KEY},
        timeout=TIMEOUT_SECONDS,
    )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    job, num_tokens = reply.headers["request-id"], reply.text.split('"input_tokens":')[1].split(",")
    counts = f'"input_tokens":{num_tokens[0]},"cache_creation_input_tokens":0'
    assert reply.text == (
        "event: message_start\n"
        f'data: {{"type":"message_start","message":{{"id":"msg_{job}","type":"message",'
        f'"role":"assistant","model":"{SCRIPTED}","content":[],"stop_reason":null,'
        f'"stop_sequence":null,"usage":{{{counts},"cache_read_input_tokens":0,'
        '"output_tokens":0}}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        "event: content_block_start\n"
        'data: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        "event: content_block_delta\n"
        'data: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Hi"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        "event: message_delta\n"
        'data: {"type":"message_delta","delta":{"stop_reason":"max_tokens",'
        f'"stop_sequence":null}},"usage":{{{counts},"cache_read_input_tokens":0,'
        '"output_tokens":1}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_seed_repeats_an_answer(client: anthropic.Anthropic) -> None:
    request = question("")
    request["messages"] = [{"role": "user", "content": "hello"}]
    first, again = (
        client.messages.create(**request, extra_body={"seed": 5, "temperature": 1.0})
        for _ in range(2)
    )
    assert first.content == again.content


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["two", "three"]}, "One ", "stop_sequence", "two"),
        ({"stop_sequences": ["four"]}, "One two three", "end_turn", None),
        ({"max_tokens": 1}, None, "max_tokens", None),
    ],
)
def test_stop_reasons(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    text: str | None,
    reason: str,
    sequence: str | None,
) -> None:
    request = question("One two three", **fields)
    message = client.messages.create(**request)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    if text is not None:
        assert message.content[0].text == text
    with client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in message.content
    ]


def test_a_full_context_is_another_stop_reason(client: anthropic.Anthropic) -> None:
    num_free = 20
    request = question("", model="a/one", max_tokens=2 * num_free)
    empty = client.messages.count_tokens(
        model="a/one", messages=[{"role": "user", "content": ""}]
    ).input_tokens
    text = "x" * (32768 - empty - num_free)
    request["messages"] = [{"role": "user", "content": text}]
    message = client.messages.create(**request)
    assert message.stop_reason in {"model_context_window_exceeded", "end_turn"}
    assert message.usage.output_tokens <= num_free


def test_count_tokens(client: anthropic.Anthropic) -> None:
    request = question("Good day.", system="Be brief.")
    usage = client.messages.create(**request).usage
    del request["max_tokens"]
    counted = client.messages.count_tokens(**request).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    del request["system"]
    assert client.messages.count_tokens(**request).input_tokens < counted


def test_models_come_in_pages(server: StubServer, client: anthropic.Anthropic) -> None:
    names = ["a/one", "b/two", "c/three", SCRIPTED]
    page = client.models.list(limit=3)
    assert [model.id for model in page.data] == names[:3]
    assert (page.has_more, page.first_id, page.last_id) == (True, "a/one", "c/three")
    assert [model.id for model in page] == names, "the SDK reads the next pages itself"
    before = client.models.list(limit=2, before_id="c/three")
    assert [model.id for model in before.data] == names[:2]
    assert not before.has_more
    model = client.models.retrieve("a/one")
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", "a/one", 32768)
    with pytest.raises(anthropic.BadRequestError, match="is not in the list"):
        client.models.list(after_id="nope")
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nope")
    plain = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
    assert plain.json()["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": "many"}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, anthropic.BadRequestError,
         "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 2**24}]}, anthropic.ContentTooLargeError,
         "request_too_large"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_streamed", [False, True])
def test_errors(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    is_streamed: bool,
) -> None:
    request = question("", model="a/one", stream=is_streamed) | fields
    with pytest.raises(error) as caught:
        client.messages.create(**request)
    assert caught.value.type == kind
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["request_id"] == caught.value.request_id
    assert caught.value.request_id


def test_a_long_prompt_names_the_context_length(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "x" * 40_000}]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 32768 tokens"):
        client.messages.create(**question("", model="a/one", messages=messages))


@pytest.mark.parametrize("keys", [{"api_key": "tml-wrong"}, {"auth_token": "tml-wrong"}])
def test_wrong_keys(server: StubServer, keys: dict[str, str]) -> None:
    with (
        connect(server, **({"api_key": None} | keys)) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(**question("x"))
    assert caught.value.type == "authentication_error"


def test_unknown_paths_and_methods(server: StubServer) -> None:
    headers = {"x-api-key": KEY}
    for path, status, kind in (
        ("/v1/messages", 405, "invalid_request_error"),
        ("/anthropic/api/v1/nothing", 404, "not_found_error"),
    ):
        reply = httpx.get(server.url + path, headers=headers, timeout=TIMEOUT_SECONDS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_headers_and_query_of_betas_are_ignored(server: StubServer) -> None:
    reply = httpx.post(
        f"{server.url}/v1/messages?beta=true",
        json=question("Yes."),
        headers={"x-api-key": KEY, "anthropic-beta": "a,b", "anthropic-version": "1999-01-01"},
        timeout=TIMEOUT_SECONDS,
    )
    assert reply.json()["content"][0]["text"] == "Yes."


def test_a_server_without_models_is_overloaded() -> None:
    with StubServer(api_keys=[KEY], models=()) as empty, connect(empty) as client:
        with pytest.raises(anthropic.OverloadedError) as caught:
            client.messages.create(**question("x"))
        assert caught.value.type == "overloaded_error"
        assert caught.value.response.headers["retry-after"]
