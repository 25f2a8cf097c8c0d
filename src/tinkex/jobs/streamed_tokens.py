"""Which tokens of a sample a reader has received, and what is new in a message.

Tokens are only appended at the expected offset. After a gap the rest comes from the stored result.
No sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from tinkex.engine.protocol import SampleProgress
from tinkex.errors import RequestErrorCategory, TinkexError
from tinkex.types.sampling import TopkRow


class StreamDiverged(TinkexError):
    """A sample that started again drew other tokens than those that were sent already."""

    category = RequestErrorCategory.Server


class StoredSequence(Protocol):
    """A sequence of a stored result."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float] | None: ...
    @property
    def topk_logprobs(self) -> list[TopkRow | None] | None: ...


class StreamedTokens:
    """The received tokens of one sample."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._tokens: dict[int, list[int]] = {}
        self._source: object = None
        self._attempt = 0
        self._has_gap = False

    @property
    def has_source(self) -> bool:
        """Whether a worker sends the tokens, without gaps so far."""
        return self._source is not None and not self._has_gap

    @property
    def num_tokens(self) -> int:
        """The number of received tokens of all sequences."""
        return sum(map(len, self._tokens.values()))

    def start(self, source: object, attempt: int) -> None:
        """A worker sends the sample from the first token; an earlier attempt is ignored."""
        if attempt >= self._attempt:
            self._source, self._attempt, self._has_gap = source, attempt, False

    def lose_source(self, source: object) -> None:
        """The connection to a worker is closed."""
        if source is self._source:
            self._source = None

    def skip(self) -> None:
        """Take the rest from the stored result."""
        self._has_gap = True

    def accept(self, source: object, progress: SampleProgress) -> SampleProgress | None:
        """Return the part of a message that is new, or None.

        Raises StreamDiverged if its other part differs from what was received before.
        """
        if source is not self._source or self._has_gap:
            return None
        if progress.offset > len(self._tokens.get(progress.sequence, ())):
            self._has_gap = True
            return None
        return self._append(progress)

    def rest(self, sequences: Sequence[StoredSequence]) -> list[SampleProgress]:
        """Return what is still missing of the stored result, in the order of the sequences.

        Raises StreamDiverged if the result differs from what was received.
        """
        missing = []
        for index, sequence in enumerate(sequences):
            if len(self._tokens.get(index, ())) > len(sequence.tokens):
                raise _diverged(self._job_id)
            new = self._append(
                SampleProgress(
                    self._job_id,
                    index,
                    0,
                    tuple(sequence.tokens),
                    tuple(sequence.logprobs or ()),
                    tuple(sequence.topk_logprobs or ()),
                )
            )
            missing += [new] if new is not None else []
        return missing

    def _append(self, progress: SampleProgress) -> SampleProgress | None:
        known = self._tokens.setdefault(progress.sequence, [])
        num_known = len(known) - progress.offset
        repeated = known[progress.offset : progress.offset + len(progress.tokens)]
        if list(progress.tokens[: len(repeated)]) != repeated:
            raise _diverged(self._job_id)
        if num_known >= len(progress.tokens):
            return None
        known += progress.tokens[num_known:]
        return progress._replace(
            offset=progress.offset + num_known,
            tokens=progress.tokens[num_known:],
            logprobs=progress.logprobs[num_known:],
            topk=progress.topk[num_known:],
        )


def join_progress(parts: Sequence[SampleProgress]) -> SampleProgress:
    """Join successive parts of one sequence."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        topk=tuple(chain.from_iterable(part.topk for part in parts)),
    )


def _diverged(job_id: str) -> StreamDiverged:
    return StreamDiverged(
        f"request {job_id} was started again after a worker had died, and drew other tokens than "
        "those that were already sent; send the request again, or set a seed on a deterministic "
        "server"
    )
