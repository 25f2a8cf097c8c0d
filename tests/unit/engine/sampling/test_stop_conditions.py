"""Stop tokens, and stop strings that span tokens and split characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.inference_request import InferenceParams
from tinkex.engine.sampling.stop_conditions import StopConditions, StopTextMatcher, parse_stop
from tinkex.errors import InvalidInput
from tinkex.types import SamplingParams

EOS = frozenset({7})


class Bytes:
    """A tokenizer whose tokens are byte strings, like byte-level BPE."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.longest = 0

    def decode(self, token_ids: Sequence[int], /) -> str:
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


def _read(stop: object, *, has_texts: bool = True) -> StopConditions:
    return parse_stop(SamplingParams(stop=stop), EOS, has_tokenizer=has_texts)  # type: ignore[arg-type]


def test_eos_tokens_stop_unless_stop_is_given() -> None:
    assert _read(None) == StopConditions(EOS)
    assert _read([]) == StopConditions()
    assert _read([3, 4]) == StopConditions(frozenset({3, 4}))
    assert _read("ab") == StopConditions(frozenset(), ("ab",))
    assert _read(["ab", "c"]) == StopConditions(frozenset(), ("ab", "c"))


def test_inference_requests_combine_all_stop_conditions() -> None:
    params = InferenceParams(stop_texts=("ab", "c"), stop_token_ids=(3,))
    both = parse_stop(params, EOS, has_tokenizer=True)
    assert both == StopConditions(EOS | {3}, ("ab", "c"))
    params = InferenceParams(stop=[], stop_texts=("ab",))
    assert parse_stop(params, EOS, has_tokenizer=True) == StopConditions(frozenset(), ("ab",))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"stop_texts": ("x",) * 129}, "129 stop texts"),
        ({"stop_texts": ("x" * 1001,)}, "1001 characters in a stop text"),
        ({"stop_token_ids": tuple(range(1025))}, "1025 stop token ids"),
    ],
)
def test_stop_conditions_are_limited(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        InferenceParams(**params)


def test_empty_stop_string_raises() -> None:
    with pytest.raises(InvalidInput, match="empty string"):
        parse_stop(InferenceParams(stop_texts=("",)), EOS, has_tokenizer=True)
    with pytest.raises(InvalidInput, match="empty string"):
        _read(["a", ""])


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        _read("a", has_texts=False)


def _stops_at(pieces: Sequence[bytes], stops: Sequence[str]) -> int | None:
    matcher = StopTextMatcher(Bytes(pieces), stops)
    return next((n for n in range(len(pieces)) if matcher.matches_after(n)), None)


def test_stop_string_spans_tokens() -> None:
    assert _stops_at([b"one", b" tw", b"o", b" three"], ["two"]) == 2
    assert _stops_at([b"a", b"b\n\nc", b"d"], ["\n\n"]) == 1
    assert _stops_at([b"a", b"b"], ["ba"]) is None


def test_character_split_over_tokens() -> None:
    euro = "\u20ac".encode()
    assert _stops_at([b"x", euro[:1], euro[1:2], euro[2:], b"y"], ["x\u20ac"]) == 3
    assert _stops_at([b"ab" + euro[:1], euro[1:], b"c"], ["ab"]) == 0


def test_stop_string_after_invalid_utf8() -> None:
    assert _stops_at([b"\xff"] * 20 + [b"st", b"op"], ["stop"]) == 21


@given(
    st.text(alphabet="ab\u00e9\u20ac\U0001f600", max_size=30),
    st.lists(st.integers(1, 3), min_size=1, max_size=60),
    st.lists(st.text(alphabet="ab\u00e9\u20ac\U0001f600", min_size=1, max_size=4), min_size=1),
)
def test_first_completing_token_ends_sequence(text: str, cuts: list[int], stops: list[str]) -> None:
    raw, pieces, at = text.encode(), [], 0
    for size in cuts * 40:
        if at >= len(raw):
            break
        pieces.append(raw[at : at + size])
        at += size
    whole = [b"".join(pieces[: n + 1]).decode(errors="ignore") for n in range(len(pieces))]
    expected = next((n for n, seen in enumerate(whole) if any(s in seen for s in stops)), None)
    assert _stops_at(pieces, stops) == expected


def test_number_of_decoded_tokens_is_bounded() -> None:
    pieces = [b"abc "] * 500
    decoder = Bytes(pieces)
    matcher = StopTextMatcher(decoder, ["never"])
    assert not any(matcher.matches_after(token) for token in range(500))
    assert decoder.longest <= 10
