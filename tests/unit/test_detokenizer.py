"""Text of tokens, one after the other, equals the text of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tinkex.detokenizer import IncrementalDetokenizer

TEXTS = st.text(alphabet="ab \u00e9\u20ac\U0001f600\ufffd", max_size=30)


class Bytes:
    """A tokenizer whose tokens are byte strings, like byte-level BPE."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.longest = 0

    def decode(self, token_ids: Sequence[int], /) -> str:
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


def decode_all(pieces: Sequence[bytes]) -> list[str]:
    detokenizer = IncrementalDetokenizer(Bytes(pieces))
    return [*(detokenizer.push(token) for token in range(len(pieces))), detokenizer.flush()]


def cut_bytes(raw: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, start = [], 0
    for size in [*sizes, *[1] * len(raw)]:
        pieces.append(raw[start : start + size])
        start += size
    return [piece for piece in pieces if piece]


@given(TEXTS, st.lists(st.integers(1, 6), max_size=30))
def test_text_is_complete_and_never_changes(text: str, sizes: list[int]) -> None:
    assert "".join(decode_all(cut_bytes(text.encode(), sizes))) == text


@given(st.lists(st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80", b"\xe2", b"a"]), max_size=20))
def test_invalid_bytes_become_replacement_characters(pieces: list[bytes]) -> None:
    assert "".join(decode_all(pieces)) == b"".join(pieces).decode(errors="replace")


def test_incomplete_characters_are_held_back() -> None:
    assert decode_all([b"a", b"\xf0\x9f", b"\x98", b"\x80b"]) == ["a", "", "", "\U0001f600b", ""]
    assert decode_all([b"a", b"\xf0\x9f"]) == ["a", "", "\ufffd"]


def test_number_of_decoded_tokens_is_bounded() -> None:
    pieces = [b"abc "] * 200 + [b"\xff"] * 200
    decoder = Bytes(pieces)
    detokenizer = IncrementalDetokenizer(decoder)
    for token in range(400):
        detokenizer.push(token)
    assert decoder.longest <= 8
