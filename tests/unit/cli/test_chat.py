"""Chat without a server: chunks, end of replies, conversation and slash commands."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.chat.session import Conversation, QuitChat
from tinkex.cli.commands.chat.streaming import (
    MAX_CHUNK_TOKENS,
    ReplyFormat,
    StreamedReply,
    next_chunk_size,
)
from tinkex.cli.commands.sampling_options import SamplingOptions
from tinkex.cli.output.streamed_text import stable_text
from tinkex.client.token_stream import TokenChunk
from tinkex.data.rendering import Renderer
from tinkex.engine.fake.toy_tokenizer import ToyTokenizer
from tinkex.errors import APIConnectionError
from tinkex.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

DRAWING = SamplingOptions(max_tokens=100, temperature=1.0, top_k=-1, top_p=1.0, seed=7)


class Ready:
    """A completed future, or one that raises KeyboardInterrupt."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.is_cancelled = False

    def result(self) -> Any:
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value

    def cancel(self) -> None:
        self.is_cancelled = True


class Script:
    """A fake sampler that returns a text in chunks of the requested size."""

    def __init__(self, tokens: Sequence[int], *, stops_at_end: bool = True) -> None:
        self._tokens = list(tokens)
        self._stops = stops_at_end
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.futures: list[Ready] = []
        self.interrupt_at: int | None = None
        self.prompt_length: int | None = None

    def sample(self, prompt: ModelInput, num: int, params: SamplingParams) -> Ready:
        seen = prompt.to_ints()
        if self.prompt_length is None:
            self.prompt_length = len(seen)
        done = len(seen) - self.prompt_length
        self.asked.append((seen, params))
        assert params.max_tokens is not None
        piece = self._tokens[done : done + params.max_tokens]
        is_end = done + len(piece) >= len(self._tokens) and self._stops
        sequence = SampledSequence(
            stop_reason="stop" if is_end else "length", sequence_id="x", _tokens_list=piece
        )
        is_interrupted = self.interrupt_at == len(self.asked)
        answer: Any = KeyboardInterrupt() if is_interrupted else SampleResponse([sequence])
        self.futures.append(Ready(answer))
        return self.futures[-1]


class Template(ToyTokenizer):
    """The toy tokenizer with a chat template; 300 starts a turn, 301 ends it."""

    chat_template = "yes"
    all_special_ids = (256, 300, 301)

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool, **options: Any
    ) -> list[int]:
        found: list[int] = []
        for message in messages:
            found += [300, *self.encode(f"{message['role']}:{message['content']}"), 301, 10]
        return [*found, 300, *self.encode("assistant:")] if add_generation_prompt else found


class Stream:
    """A fake streamer that yields chunks, then ends or raises."""

    def __init__(self, *chunks: TokenChunk, error: BaseException | None = None) -> None:
        self._chunks = chunks
        self._error = error
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.is_closed = False

    def stream(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> Generator[TokenChunk, None, None]:
        self.asked.append((list(prompt), params))
        try:
            yield from self._chunks
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


def answer(
    script: Script,
    manner: ReplyFormat | None = None,
    drawing: SamplingOptions = DRAWING,
    stream: Stream | None = None,
) -> StreamedReply:
    manner = manner or ReplyFormat.for_renderer(Renderer(ToyTokenizer()))
    return StreamedReply(script, [1, 2, 3], drawing, manner, stream)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.floats(min_value=0.0, max_value=1e6))
def test_chunk_size_stays_within_bounds(size: int, seconds: float) -> None:
    assert 1 <= next_chunk_size(size, seconds) <= min(2 * size, MAX_CHUNK_TOKENS)


def test_chunk_size_follows_server_speed() -> None:
    assert next_chunk_size(16, 3.0) < 16 < next_chunk_size(16, 0.01)


@given(st.text(), st.lists(st.text(min_size=1, max_size=5), max_size=3), st.data())
def test_stable_text_never_changes(text: str, ends: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    final, _ = stable_text(text, ends, is_over=True)
    for cut in cuts:
        shown, _ = stable_text(text[:cut], ends, is_over=False)
        assert final.startswith(shown)


def test_reply_is_the_concatenated_chunks() -> None:
    text = "Grüße, 世界! " * 5
    script = Script(list(text.encode()), stops_at_end=True)
    told = answer(script)
    pieces = list(told.stream())
    assert "".join(pieces) == told.text == text.strip() + " "
    assert len(pieces) > 2
    assert "\ufffd" not in "".join(pieces)
    assert told.end_reason == "stop"
    # Each chunk continues the previous one with its own seed.
    lengths = [len(seen) for seen, _ in script.asked]
    assert lengths == sorted(set(lengths))
    assert len({params.seed for _, params in script.asked}) == len(script.asked)


def test_reply_respects_max_tokens() -> None:
    script = Script(list(b"a" * 500))
    told = answer(script)
    assert "".join(told.stream()) == "a" * 100
    assert (told.end_reason, len(told.tokens)) == ("length", 100)


def test_role_name_ends_reply_without_template() -> None:
    script = Script(list(b" fine, thanks\nUser: and then?"), stops_at_end=False)
    told = answer(script)
    assert "".join(told.stream()) == "fine, thanks"
    assert told.end_reason == "stop"


def test_stop_text_may_span_chunks() -> None:
    script = Script(list(b"abcENDdef"), stops_at_end=False)
    told = answer(script, drawing=DRAWING._replace(stop=("END",)))
    assert "".join(told.stream()) == "abc"
    assert told.end_reason == "stop"


def test_seeded_chunks_do_not_depend_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(seconds: float) -> list[int | None]:
        ticks = iter(range(1000))
        monkeypatch.setattr("time.monotonic", lambda: next(ticks) * seconds)
        script = Script(list(b"a" * 500))
        list(answer(script, drawing=DRAWING._replace(seed=7)).stream())
        return [params.max_tokens for _, params in script.asked]

    assert sizes(1e-4) == sizes(10.0)


def test_end_of_turn_token_ends_reply() -> None:
    manner = ReplyFormat.for_renderer(Renderer(Template()))
    assert manner.end_tokens == {301}
    script = Script([*b"fine", 301, *b"nonsense"], stops_at_end=False)
    told = answer(script, manner)
    assert "".join(told.stream()) == "fine"
    assert told.end_reason == "stop"


def test_ctrl_c_cancels_chunk_and_keeps_text() -> None:
    script = Script(list(b"a long story"))
    script.interrupt_at = 2
    told = answer(script)
    with pytest.raises(KeyboardInterrupt):
        list(told.stream())
    assert (told.text, told.end_reason) == ("a lo", "interrupted")
    assert script.futures[-1].is_cancelled


def test_reply_of_a_stream() -> None:
    text = "Grüße!".encode()
    stream = Stream(
        TokenChunk([32, *text[:3]]), TokenChunk([]), TokenChunk(list(text[3:]), "length")
    )
    script = Script([])
    told = answer(script, stream=stream, drawing=DRAWING._replace(stop=("END",)))
    assert list(told.stream()) == ["Gr", "üße!"]
    assert (told.text, told.end_reason) == ("Grüße!", "length")
    assert script.asked == []
    (request,) = stream.asked
    assert request[0] == [1, 2, 3]
    assert (request[1].max_tokens, request[1].seed) == (100, 7)
    assert request[1].stop == ["\nUser:", "\nSystem:", "END"]


def test_end_of_a_reply_cancels_the_stream() -> None:
    manner = ReplyFormat.for_renderer(Renderer(Template()))
    for tokens, options in (([*b"fine", 301], DRAWING), (list(b"fineEND"), DRAWING)):
        stream = Stream(TokenChunk(tokens), TokenChunk(list(b"nonsense")))
        told = answer(Script([]), manner, options._replace(stop=("END",)), stream)
        assert "".join(told.stream()) == "fine"
        assert told.end_reason == "stop"
        assert stream.is_closed


@pytest.mark.parametrize("num_streamed", [0, 4, 12])
def test_chunks_complete_a_stream_that_failed(num_streamed: int) -> None:
    text = b"a long story"
    script = Script(list(text))
    script.prompt_length = 3
    chunks = [TokenChunk(list(text[:num_streamed]))] if num_streamed else []
    stream = Stream(*chunks, error=APIConnectionError())
    told = answer(script, stream=stream, drawing=DRAWING._replace(max_tokens=12))
    assert "".join(told.stream()) == text.decode()
    assert told.end_reason == ("length" if num_streamed == 12 else "stop")
    assert [len(seen) for seen, _ in script.asked][:1] == [3 + num_streamed][: 12 - num_streamed]


def test_ctrl_c_closes_the_stream() -> None:
    stream = Stream(TokenChunk(list(b"a lo")), error=KeyboardInterrupt())
    told = answer(Script([]), stream=stream)
    with pytest.raises(KeyboardInterrupt):
        list(told.stream())
    assert (told.text, stream.is_closed) == ("a lo", True)


# --- what is remembered -----------------------------------------------------------------------


def test_prompt_contains_the_whole_conversation() -> None:
    talk = Conversation("be brief")
    talk.add("hi", "hello")
    assert talk.with_user_message("and?") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ]


def test_slash_commands() -> None:
    talk = Conversation()
    talk.add("hi", "hello")
    assert talk.run_slash_command("/system  be kind ") == "System message set."
    assert talk.system == "be kind"
    assert talk.run_slash_command("/system") == "System message removed."
    assert talk.run_slash_command("/reset") is not None
    assert talk.with_user_message("x") == [{"role": "user", "content": "x"}]
    assert "/save FILE" in (talk.run_slash_command("/help") or "")
    for word in ("/quit", "/exit"):
        with pytest.raises(QuitChat):
            talk.run_slash_command(word)


@given(st.text())
def test_other_text_is_not_a_slash_command(text: str) -> None:
    known = ("/system", "/reset", "/save", "/quit", "/exit", "/help")
    if not text.strip().startswith(known):
        assert Conversation().run_slash_command(text) is None


def test_save_appends_training_rows(tmp_path: Path) -> None:
    from tinkex.data.rows import ChatRow

    path = tmp_path / "talks.jsonl"
    talk = Conversation("be brief")
    assert talk.run_slash_command(f"/save {path}") == "Nothing to save yet."
    talk.add("hi", "hellö")
    assert talk.run_slash_command(f"/save {path}") == f"Saved 2 messages to {path}"
    assert talk.run_slash_command(f"/save {path}") == f"Saved 2 messages to {path}"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == rows[1]
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant"]
    assert ChatRow(tuple(rows[0]["messages"]))
    assert talk.run_slash_command("/save") == "Usage: /save FILE"
    assert "cannot be written" in (talk.run_slash_command(f"/save {tmp_path}/talks.jsonl/x") or "")
