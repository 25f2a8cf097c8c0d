"""Log-probabilities in the forms of OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.server.inference.generation import SampledToken
from tinkex.server.inference.token_texts import TextOffsets, TokenTexts

#: JSON has no infinity; what OpenAI sends for tokens that cannot occur.
MIN_LOGPROB = -9999.0


class TokenNames:
    """Names tokens in log-probabilities, by their text or by their id."""

    def __init__(self, texts: TokenTexts, *, are_ids: bool) -> None:
        self.texts = texts
        self._are_ids = are_ids

    def name(self, token: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token}" if self._are_ids else self.texts.text_of(token)


def chat_logprobs(
    names: TokenNames, tokens: Sequence[SampledToken], num_top: int
) -> dict[str, object]:
    """Return the `logprobs` of a chat choice: all its tokens, whatever became of them."""
    return {
        "content": [
            {
                **_chat_entry(names, token.id, token.logprob),
                "top_logprobs": [
                    _chat_entry(names, other, logprob)
                    for other, logprob in _top_row(token, num_top)
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _chat_entry(names: TokenNames, token: int, logprob: float | None) -> dict[str, object]:
    return {
        "token": names.name(token),
        "logprob": _finite(logprob),
        "bytes": list(names.texts.bytes_of(token)),
    }


def _top_row(token: SampledToken, num_top: int) -> list[tuple[int, float | None]]:
    """Return the most likely tokens; the sampled one has exactly its own log-probability."""
    row = (token.topk or [])[:num_top]
    return [(other, token.logprob if other == token.id else logprob) for other, logprob in row]


class TextLogprobs:
    """Builds the `logprobs` of one completion, part by part."""

    def __init__(self, names: TokenNames, num_top: int, context: Sequence[int] = ()) -> None:
        """`context` are the tokens before the first one, if they are not part of the text."""
        self._names = names
        self._num_top = num_top
        self._offsets = TextOffsets(names.texts, context)

    def build(self, tokens: Sequence[SampledToken]) -> dict[str, object]:
        """Return the log-probabilities of the next tokens; None where there are none."""
        return {
            "tokens": [self._names.name(token.id) for token in tokens],
            "token_logprobs": [
                None if token.logprob is None else _finite(token.logprob) for token in tokens
            ],
            "top_logprobs": [self._build_top(token) for token in tokens],
            "text_offset": [self._offsets.push(token.id) for token in tokens],
        }

    def _build_top(self, token: SampledToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for other, logprob in _top_row(token, self._num_top):
            name = self._names.name(other)
            # Different tokens can have the same text.
            top[name] = max(_finite(logprob), top.get(name, MIN_LOGPROB))
        # Clients compare it with the token's own log-probability by equality.
        top[self._names.name(token.id)] = _finite(token.logprob)
        return top


def _finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
