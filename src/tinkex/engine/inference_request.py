"""Sample requests of the inference endpoints, which can express more than those of the SDK.

The worker reads them from the payloads of jobs; they never come from a client. Every engine accepts
them where it accepts a `SampleRequest`.
"""

from __future__ import annotations

from tinkex.errors import InvalidInput
from tinkex.types import SampleRequest, SamplingParams

#: Limits of stop conditions of one request.
MAX_STOP_TEXTS = 128
MAX_STOP_TEXT_CHARS = 1000
MAX_STOP_TOKENS = 1024


class InferenceParams(SamplingParams):
    """How the tokens of an answer are sampled.

    `stop` has its usual meaning: None ends at the EOS tokens, an empty list does not. The other
    stop conditions are added to it.
    """

    stop_texts: tuple[str, ...] = ()
    """Texts that end a sequence; they are part of its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""

    is_prompt_only: bool = False
    """Only score the prompt: the sequences are empty, whatever `max_tokens` is."""

    grammar: str | None = None
    """What the sequence must follow, as built by `grammar_schemas`; it ends where the grammar
    allows the EOS token."""
    grammar_start_text: str = ""
    """The grammar applies after this text, such as the end of the reasoning; empty: at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("stop texts", len(self.stop_texts), MAX_STOP_TEXTS)
        _check_count("stop token ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        longest = max(map(len, self.stop_texts), default=0)
        _check_count("characters in a stop text", longest, MAX_STOP_TEXT_CHARS)
        if self.grammar is not None and self.stop is not None:
            raise InvalidInput("a grammar needs the EOS tokens; give stop_texts instead of stop")


class InferenceRequest(SampleRequest):
    """A request of the inference endpoints."""

    sampling_params: InferenceParams


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInput(f"there are {count} {name}; expected at most {limit}")
