"""Drift: how far the log-probabilities of a group that only samples are from the trainer's.

A few samples are scored again, as prompts, by a group that trains.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple
from uuid import uuid4

from tinkex import clock, types
from tinkex.errors import StoreError
from tinkex.jobs.active_samples import SampleOrigin
from tinkex.jobs.group_member import GroupMember
from tinkex.jobs.job_types import INTERNAL_TENANT, JobKind
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.store import jobs, keys
from tinkex.store.database import Connection, Database
from tinkex.store.records import NewJob
from tinkex.store.write_locks import SHARED
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import decode_sample_response

LOG = get_logger(__name__)
#: Part of the samples that are scored again.
FRACTION = 0.01
#: A sample is scored again after this time in any case.
MAX_INTERVAL_SECONDS = 60.0
#: Samples that are scored at a time.
MAX_PENDING = 8
#: A score that has not come after this time is given up.
MAX_WAIT_SECONDS = 600.0
#: Scored samples that the numbers cover.
WINDOW = 100
#: Mean difference above which on-policy training suffers.
WARNING_DRIFT = 0.02


class SampleDrift(NamedTuple):
    """The absolute differences of one sample's log-probabilities."""

    num_tokens: int
    total: float
    largest: float


class _PendingScore(NamedTuple):
    logprobs: list[float]
    base_model: str
    submitted_at: float


def build_score_request(
    origin: SampleOrigin, request: types.SampleRequest, response: types.SampleResponse
) -> tuple[types.SampleRequest, list[float]] | None:
    """Return a request that scores a sample, and the log-probabilities to compare with.

    None if they cannot be compared: prompts are scored without a temperature.
    """
    sequence = response.sequences[0]
    logprobs = sequence.logprobs
    if request.sampling_params.temperature not in {0.0, 1.0} or not logprobs:
        return None
    checkpoint_id = origin.checkpoint.id if origin.checkpoint is not None else None
    score = types.SampleRequest(
        prompt=types.ModelInput.from_ints([*request.prompt.to_ints(), *sequence.tokens]),
        sampling_params=types.SamplingParams(max_tokens=1, temperature=0.0),
        base_model=origin.source.base_model if checkpoint_id is None else None,
        model_path=checkpoint_id,
        prompt_logprobs=True,
        prompt_logprobs_last_n=len(logprobs),
    )
    return score, logprobs


def compare(theirs: list[float], result: bytes) -> SampleDrift:
    """Compare log-probabilities with the stored result of their score request."""
    scored = decode_sample_response(result).prompt_logprobs or []
    differences = [
        abs(own - other)
        for own, other in zip(scored[-len(theirs) :], theirs, strict=True)
        if own is not None
    ]
    return SampleDrift(len(differences), sum(differences), max(differences, default=0.0))


def summarize(drifts: deque[SampleDrift]) -> Mapping[str, float]:
    """Return the mean and maximum over all tokens."""
    if not drifts:
        return {}
    return {
        "drift_mean": sum(drift.total for drift in drifts) / sum(d.num_tokens for d in drifts),
        "drift_max": max(drift.largest for drift in drifts),
    }


class DriftMonitor:
    """Has samples of this group scored again, and reports the differences with its load."""

    def __init__(
        self,
        database: Database,
        member: GroupMember,
        *,
        draw: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._member = member
        self._draw = draw
        self._monotonic = monotonic
        self._pending: dict[str, _PendingScore] = {}
        self._drifts: deque[SampleDrift] = deque(maxlen=WINDOW)
        self._last_at = -MAX_INTERVAL_SECONDS
        self._warned_at = -MAX_INTERVAL_SECONDS
        self._wakeup = WakeupSender(database, "worker")

    def observe(
        self, origin: SampleOrigin, request: types.SampleRequest, response: types.SampleResponse
    ) -> None:
        """Have a sample scored again, if it is its turn."""
        now = self._monotonic()
        is_due = self._draw() < FRACTION or now >= self._last_at + MAX_INTERVAL_SECONDS
        if self._member.can_train or not is_due or len(self._pending) >= MAX_PENDING:
            return
        comparable = build_score_request(origin, request, response)
        base_model = origin.source.base_model
        target = self._member.place_on_trainer(INTERNAL_TENANT, base_model)
        if comparable is None or target is None:
            return
        self._last_at = now
        self._submit(*comparable, base_model=base_model, target=target)

    def _submit(
        self, score: types.SampleRequest, logprobs: list[float], *, base_model: str, target: str
    ) -> None:
        new_job = NewJob(
            id=uuid4().hex,
            tenant_id=INTERNAL_TENANT,
            session_id="",
            kind=JobKind.SAMPLE,
            key=None,
            position=0,
            payload=encode_json(score),
            num_sequences=1,
            num_tokens=score.prompt.length + 1,
            base_model=base_model,
            group_id=target,
        )

        def work(db: Connection) -> None:
            keys.ensure_tenant(db, INTERNAL_TENANT, clock.now())
            jobs.insert(db, new_job, clock.now())

        self._database.write_soon(work, SHARED).add_done_callback(self._notify_trainer)
        self._pending[new_job.id] = _PendingScore(logprobs, base_model, self._monotonic())

    def _notify_trainer(self, stored: Future[None]) -> None:
        if (error := stored.exception()) is not None:
            LOG.warning("cannot have a sample scored again: %s", error)
        else:
            self._wakeup.notify()

    def collect(self) -> None:
        """Compare the scores that have come, and update the group's measurements."""
        if not self._pending:
            return
        try:
            outcomes = self._database.read(self._find_outcomes)
        except StoreError:
            return
        done = [job_id for job_id, outcome in outcomes.items() if self._is_done(job_id, outcome)]
        for job_id in done:
            pending, outcome = self._pending.pop(job_id), outcomes[job_id]
            if outcome is not None and outcome.result is not None:
                self._drifts.append(compare(pending.logprobs, outcome.result))
        if not done:
            return
        # So that they are deleted soon.
        self._database.write_soon(lambda db: jobs.mark_fetched(db, done, clock.now()), SHARED)
        self._member.measurements = summarize(self._drifts)
        self._warn()

    def _is_done(self, job_id: str, outcome: jobs.JobWithResult | None) -> bool:
        """Return whether a score has come, has failed or is given up."""
        if outcome is not None and outcome.job.is_finished:
            return True
        return self._monotonic() > self._pending[job_id].submitted_at + MAX_WAIT_SECONDS

    def _find_outcomes(self, db: Connection) -> dict[str, jobs.JobWithResult | None]:
        return {job_id: jobs.find_with_result(db, job_id) for job_id in self._pending}

    def _warn(self) -> None:
        mean = self._member.measurements.get("drift_mean", 0.0)
        now = self._monotonic()
        if mean <= WARNING_DRIFT or now < self._warned_at + MAX_INTERVAL_SECONDS:
            return
        self._warned_at = now
        LOG.warning(
            "sampled log-probabilities differ from the trainer's by %.4f on average, at most %.3f, "
            "in the last %d samples; for exact ones, sample with the trainer",
            *(mean, self._member.measurements["drift_max"], len(self._drifts)),
        )

    def close(self) -> None:
        """Close the socket."""
        self._wakeup.close()
