"""Requests with grammars: they wait for the compilation, and their rows are masked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from tinkex.engine.protocol import EngineFailure
from tinkex.engine.sampling.grammars import Grammar, GrammarCompiler, Mask
from tinkex.engine.sampling.request import GrammarSpec
from tinkex.engine.sampling.request_state import RequestState, SequenceState
from tinkex.errors import InvalidInput


class CompilingRequests:
    """Requests whose grammars are being compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pending: dict[str, tuple[RequestState, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._pending

    def add(self, request: RequestState, spec: GrammarSpec) -> None:
        """Start to compile the grammar of a request."""
        self._pending[request.job_id] = request, self._compiler.submit(spec)

    def cancel(self, job_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        _, future = self._pending.pop(job_id, (None, None))
        if future is not None:
            future.cancel()

    def clear(self) -> None:
        """Forget all requests."""
        for job_id in list(self._pending):
            self.cancel(job_id)

    def take_compiled(
        self, timeout_seconds: float
    ) -> list[tuple[RequestState, Grammar | EngineFailure]]:
        """Return the requests whose compilation has ended; waits a while for the first."""
        wait([future for _, future in self._pending.values()], timeout_seconds, "FIRST_COMPLETED")
        ended = [pair for pair in self._pending.values() if pair[1].done()]
        for request, _ in ended:
            del self._pending[request.job_id]
        return [(request, _to_outcome(future)) for request, future in ended]


def _to_outcome(future: Future[Grammar]) -> Grammar | EngineFailure:
    try:
        return future.result()
    except InvalidInput as error:
        return EngineFailure(error.message, error.category)


def compute_masks(
    sequences: Sequence[SequenceState], rows: Iterable[int]
) -> tuple[dict[int, Mask], dict[RequestState, EngineFailure]]:
    """The allowed tokens of rows with a grammar, and the requests whose grammar has failed."""
    masks: dict[int, Mask] = {}
    failed: dict[RequestState, EngineFailure] = {}
    for row in rows:
        grammar = sequences[row].grammar
        if grammar is None or not grammar.has_started:
            continue
        try:
            masks[row] = grammar.allowed_tokens()
        except InvalidInput as error:
            failed[sequences[row].request] = EngineFailure(error.message, error.category)
    return masks, failed
