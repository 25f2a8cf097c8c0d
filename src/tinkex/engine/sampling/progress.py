"""Partial results: the tokens of watched requests since they were last reported."""

from __future__ import annotations

from collections.abc import Container, Mapping

from tinkex.engine.protocol import SampleProgress
from tinkex.engine.sample_watches import SampleWatches
from tinkex.engine.sampling.request_state import RequestState


class WatchedRequests:
    """The watched requests among those of a batcher.

    Sequences keep their tokens when they are preempted and when the KV cache is lost, so that a
    token never gets another offset.
    """

    def __init__(self, requests: Mapping[str, RequestState], waiting: Container[str] = ()) -> None:
        """`requests` are all started requests, `waiting` the others; both change meanwhile."""
        self._requests = requests
        self._waiting = waiting
        self._watches = SampleWatches()

    def __bool__(self) -> bool:
        return bool(self._watches)

    def watch(self, job_id: str) -> None:
        """Report a request from its first token on; unknown ids are ignored."""
        if job_id in self._requests or job_id in self._waiting:
            self._watches.watch(job_id)

    def unwatch(self, job_id: str) -> None:
        """Stop reporting a request; unknown ids are ignored."""
        self._watches.unwatch(job_id)

    def take_progress(self) -> list[SampleProgress]:
        """Return the new tokens of all watched requests."""
        found = []
        for request in self._unfinished():
            lengths = ((each.index, len(each.tokens)) for each in request.sequences)
            found += [
                request.sequences[index].progress(start, end)
                for index, start, end in self._watches.take_new(request.job_id, lengths)
            ]
        return found

    def has_first_token(self) -> bool:
        """Whether a sequence has tokens and none was reported, so that it should be now."""
        return any(
            sequence.tokens and self._watches.is_unreported(request.job_id, sequence.index)
            for request in self._unfinished()
            for sequence in request.sequences
        )

    def _unfinished(self) -> list[RequestState]:
        """The watched requests that run; forgets those that are finished."""
        found = []
        for job_id in self._watches.job_ids:
            request = self._requests.get(job_id)
            if request is not None:
                found.append(request)
            elif job_id not in self._waiting:
                self._watches.unwatch(job_id)
        return found
