"""Output of samples: text for people, the full response as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Format, Screen
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.output.base import Column, Output, to_json

if TYPE_CHECKING:
    from tinkex.text import Tokenizer
    from tinkex.types import SampledSequence, SampleResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequestInfo:
    """The request of a sample."""

    base_model: str | None
    model_path: str | None
    prompt_tokens: Sequence[int]
    with_logprobs: bool = False


class SampleOutput(Output):
    """The samples of one request."""

    def __init__(
        self, response: SampleResponse, request: SampleRequestInfo, tokenizer: Tokenizer | None
    ) -> None:
        """Without a tokenizer, token ids are printed instead of text."""
        self._response = response
        self._request = request
        self._tokenizer = tokenizer

    @property
    def num_tokens(self) -> int:
        """Total number of sampled tokens."""
        return sum(len(sequence.tokens) for sequence in self._response.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has any text."""
        return not any(self._text(sequence).strip() for sequence in self._response.sequences)

    def to_dict(self) -> dict[str, object]:
        """The full response, plus the text of each sequence."""
        response = self._response
        data: dict[str, object] = {
            "type": "sample",
            "base_model": self._request.base_model,
            "model_path": self._request.model_path,
            "prompt_tokens": list(self._request.prompt_tokens),
            "sequences": [self._sequence_to_dict(sequence) for sequence in response.sequences],
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        }
        if response.prompt_logprobs is not None:
            data["prompt_logprobs"] = response.prompt_logprobs
        if response.topk_prompt_logprobs is not None:
            data["topk_prompt_logprobs"] = response.topk_prompt_logprobs
        return data

    def columns(self) -> Sequence[Column]:
        """Number, stop reason and text."""
        return (Column("#"), Column("Stop", 1), Column("Text"))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per sample."""
        sequences = enumerate(self._response.sequences, 1)
        return [[str(no), sequence.stop_reason, self._text(sequence)] for no, sequence in sequences]

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Write the texts, or everything as JSON, to stdout."""
        if format == "json":
            super().print(format, screen)
            return
        text = self.to_text()
        # Escape control characters on a terminal; files and pipes get the raw text.
        is_terminal = screen is not None and screen.is_terminal
        click.echo(escape_lines(text) if is_terminal else text, color=True)

    def to_file_text(self, format: Format) -> str:
        """Return the content of an output file."""
        return to_json(self.to_dict()) if format == "json" else self.to_text()

    def to_text(self) -> str:
        """Return the texts; with several samples, put a header line above each."""
        sequences = self._response.sequences
        parts = [self._sequence_text(sequence) for sequence in sequences]
        if len(sequences) == 1:
            return parts[0]
        heads = [
            f"--- sample {no} of {len(sequences)} "
            f"({format_count(len(sequence.tokens), 'token')}, {sequence.stop_reason}) ---"
            for no, sequence in enumerate(sequences, 1)
        ]
        return "\n\n".join(f"{head}\n{part}" for head, part in zip(heads, parts, strict=True))

    def _sequence_text(self, sequence: SampledSequence) -> str:
        text = self._text(sequence)
        if not self._request.with_logprobs or sequence.logprobs is None:
            return text
        scored = zip(sequence.logprobs, sequence.tokens, strict=True)
        lines = [f"{score:9.4f}  {token:>7}  {self._token_text(token)}" for score, token in scored]
        return "\n".join([text, "", "  logprob    token  text", *lines])

    def _sequence_to_dict(self, sequence: SampledSequence) -> dict[str, object]:
        data: dict[str, object] = {
            "text": None if self._tokenizer is None else self._text(sequence),
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs,
            "stop_reason": sequence.stop_reason,
            "sequence_id": sequence.sequence_id,
        }
        if sequence.topk_logprobs is not None:
            data["topk_logprobs"] = sequence.topk_logprobs
        return data

    def _text(self, sequence: SampledSequence) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, sequence.tokens))
        return self._tokenizer.decode(sequence.tokens, skip_special_tokens=True)

    def _token_text(self, token: int) -> str:
        return repr(self._tokenizer.decode([token])) if self._tokenizer is not None else ""


def escape_lines(text: str) -> str:
    """Escape the control characters of a text except newlines."""
    return "\n".join(escape_line(line.replace("\t", "    ")) for line in text.split("\n"))
