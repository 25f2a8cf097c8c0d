"""Running samples: their weights, and their results."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tinkex import clock, types
from tinkex.checkpoint.blob_cache import Pin
from tinkex.checkpoint.places import BlobsUnavailable, retry_seconds
from tinkex.engine.protocol import Declined, EngineFailure, SamplerSource
from tinkex.errors import InvalidInput
from tinkex.ids import parse_tinker_path
from tinkex.jobs import job_types
from tinkex.jobs.job_types import (
    INTERNAL_TENANT,
    Completed,
    Effect,
    Failed,
    JobOutcome,
    to_failed,
)
from tinkex.jobs.result_log import ResultEntry, count_usage
from tinkex.jobs.sample_publisher import SamplePublisher
from tinkex.jobs.token_stream_server import TokenStreamServer
from tinkex.jobs.worker_context import WorkerContext
from tinkex.store import checkpoints, samplers
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, JobRecord
from tinkex.wire.proto import encode_sample_response

_MAX_CACHED_ORIGINS = 1024
#: Weights in blobs that were deleted can be sampled from for this time.
BLOB_ORIGIN_SECONDS = 2.0
#: Samples that may wait for files in blobs; then no more are started.
MAX_WAITING = 256


class SampleOrigin:
    """The weights of a sample, and the run that its usage is counted for."""

    __slots__ = ("checkpoint", "queried_at", "run_id", "source")

    def __init__(self, source: SamplerSource, checkpoint: CheckpointRecord | None = None) -> None:
        self.source = source
        self.checkpoint = checkpoint
        self.run_id = checkpoint.run_id if checkpoint is not None else ""
        self.queried_at = time.monotonic()

    @property
    def is_current(self) -> bool:
        """Whether the weights exist; those in blobs are looked up again after a while."""
        if self.checkpoint is not None and self.checkpoint.place:
            return time.monotonic() - self.queried_at < BLOB_ORIGIN_SECONDS
        return self.source.directory is None or self.source.directory.is_dir()


class _RunningSample(NamedTuple):
    job: JobRecord
    origin: SampleOrigin
    request: types.SampleRequest
    started_at: float
    pin: Pin | None


class _WaitingSample(NamedTuple):
    job: JobRecord
    payload: bytes
    retry_at: float


ObserveSample: TypeAlias = Callable[[SampleOrigin, types.SampleRequest, types.SampleResponse], None]
"""Called with every successful sample."""


class ActiveSamples:
    """The samples that run in the engine."""

    def __init__(
        self,
        context: WorkerContext,
        streams: TokenStreamServer,
        observe: ObserveSample = lambda *_: None,
    ) -> None:
        self._context = context
        self._publisher = SamplePublisher(context.engine, streams)
        self._observe = observe
        self._running: dict[str, _RunningSample] = {}
        self._declined: list[tuple[JobRecord, str]] = []
        self._waiting: dict[str, _WaitingSample] = {}
        """Samples whose files are being downloaded, or wait for the object store."""
        self._origins: OrderedDict[str, SampleOrigin] = OrderedDict()

    @property
    def job_ids(self) -> list[str]:
        """The ids of the started jobs."""
        return [*self._running, *self._waiting]

    @property
    def can_start(self) -> bool:
        """Whether more samples may be started."""
        return not self.is_exclusive and len(self._waiting) < MAX_WAITING

    def next_retry_at(self) -> float | None:
        """Return when the first waiting sample is tried again."""
        return min((sample.retry_at for sample in self._waiting.values()), default=None)

    def retry_waiting(self) -> list[ResultEntry]:
        """Start waiting samples whose time has come; returns those that cannot be started."""
        now = time.monotonic()
        due = [sample for sample in self._waiting.values() if sample.retry_at <= now]
        for sample in due:
            del self._waiting[sample.job.id]
        payloads = {sample.job.id: sample.payload for sample in due}
        return self.start_all([sample.job for sample in due], payloads)

    def start_all(
        self, jobs: Sequence[JobRecord], payloads: Mapping[str, bytes]
    ) -> list[ResultEntry]:
        """Start samples; returns those that cannot be started."""
        outcomes = [(job, self.start(job, payloads[job.id])) for job in jobs]
        return [
            ResultEntry(job, failed, None, clock.now())
            for job, failed in outcomes
            if failed is not None
        ]

    @property
    def running_jobs(self) -> list[JobRecord]:
        """The running jobs."""
        return [sample.job for sample in self._running.values()]

    @property
    def is_exclusive(self) -> bool:
        """Whether a retried sample runs, which must run alone."""
        return any(sample.job.attempts for sample in self._running.values())

    def start(self, job: JobRecord, payload: bytes) -> Failed | None:
        """Start a sample in the engine; returns the failure if that is impossible.

        A sample whose files are not here yet waits for them.
        """
        pin = None
        try:
            if job.payload_ref is not None and not payload:
                payload = self._context.storage.read_payload(job.payload_ref)
            request = job_types.decode_sample_payload(payload)
            origin = self._find_origin(job, request)
            pin = self._pin_files(origin)
            self._context.engine.start_sample(job.id, origin.source, request)
        except job_types.WORKER_ERRORS:
            raise
        except BlobsUnavailable as error:
            retry_at = time.monotonic() + retry_seconds(error)
            self._waiting[job.id] = _WaitingSample(job, payload, retry_at)
            return None
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            if pin is not None:
                pin.close()
            return to_failed(error, job.kind)
        self._running[job.id] = _RunningSample(job, origin, request, clock.now(), pin)
        self._publisher.sample_started(job)
        return None

    def _pin_files(self, origin: SampleOrigin) -> Pin | None:
        """Keep weights in blobs on disk while they are sampled from."""
        saved = origin.checkpoint
        if saved is None or not saved.place:
            return None
        return self._context.storage.pin_checkpoint(saved.id, saved.place, saved.path)

    def step(self) -> list[tuple[JobRecord, float, JobOutcome]]:
        """Run one engine step; returns finished jobs with their start time and outcome."""
        results = []
        finished = self._context.engine.step_samples()
        self._publisher.publish(self._find_running)
        for job_id, outcome in finished:
            sample = self._remove(job_id)
            if sample is None:
                continue
            if isinstance(outcome, Declined):
                self._declined.append((sample.job, outcome.reason))
                continue
            if isinstance(outcome, types.SampleResponse):
                self._observe(sample.origin, sample.request, outcome)
            results.append((sample.job, sample.started_at, _sample_outcome(sample, outcome)))
        return results

    def take_declined(self) -> list[tuple[JobRecord, str]]:
        """Return the samples that the engine leaves to other groups, with its reasons."""
        declined, self._declined = self._declined, []
        return declined

    def cancel(self, job_id: str) -> Sequence[Effect]:
        """Stop a started sample; returns the usage of what its client may have received."""
        self._waiting.pop(job_id, None)
        sample = self._remove(job_id)
        if sample is None:
            return ()
        num_sampled = self._context.engine.cancel_sample(job_id)
        # Other clients receive nothing of a cancelled sample.
        if sample.job.process_id is None or not num_sampled:
            return ()
        return _usage_effects(
            sample, {"prefill": sample.request.prompt.length, "sample": num_sampled}
        )

    def _find_running(self, job_id: str) -> JobRecord | None:
        sample = self._running.get(job_id)
        return sample.job if sample is not None else None

    def _remove(self, job_id: str) -> _RunningSample | None:
        sample = self._running.pop(job_id, None)
        if sample is None:
            return None
        self._publisher.sample_ended(job_id)
        if sample.pin is not None:
            sample.pin.close()
        return sample

    def _find_origin(self, job: JobRecord, request: types.SampleRequest) -> SampleOrigin:
        cached = self._origins.get(job.sampler_id or "")
        if cached is not None and cached.is_current:
            return cached
        origin = self._context.database.read(lambda db: self._query_origin(db, job, request))
        saved = origin.checkpoint
        if saved is not None and not saved.place:
            self._context.storage.pin_checkpoint(saved.id, saved.place, saved.path).close()
        # A path may name other weights later; a sampling session always uses the same ones.
        if job.sampler_id is not None:
            self._origins[job.sampler_id] = origin
            if len(self._origins) > _MAX_CACHED_ORIGINS:
                self._origins.popitem(last=False)
        return origin

    def _query_origin(
        self, db: Connection, job: JobRecord, request: types.SampleRequest
    ) -> SampleOrigin:
        now, scope = clock.now(), job.tenant_id
        if job.sampler_id is not None:
            sampler = samplers.find(db, job.sampler_id)
            if sampler is None:
                raise InvalidInput(f"sampling session {job.sampler_id} is gone")
            base_model, checkpoint_id = sampler.base_model, sampler.checkpoint_id
            if checkpoint_id is None:
                return SampleOrigin(SamplerSource(base_model=base_model, tenant_id=scope))
            checkpoint = checkpoints.find_by_id(db, checkpoint_id, now)
            if checkpoint is None and sampler.model_path is None:
                raise InvalidInput(
                    f"the weights of sampling session {sampler.id} were deleted: a model keeps the "
                    f"{self._context.max_unnamed_weights} unnamed sampler weights that were used "
                    "last; save the weights again, or save them under a name to keep them"
                )
        elif request.model_path is not None and scope == INTERNAL_TENANT:
            # The server's own jobs give the id: unnamed weights have no path.
            checkpoint = checkpoints.find_by_id(db, request.model_path, now)
        elif request.model_path is not None:
            checkpoint = checkpoints.find(db, parse_tinker_path(request.model_path), now)
            if checkpoint is not None and _is_replaced_by_other_tenant(checkpoint, job):
                checkpoint = None
        else:
            return SampleOrigin(SamplerSource(base_model=request.base_model or "", tenant_id=scope))
        if checkpoint is None:
            raise InvalidInput("the weights to sample from were deleted or have expired")
        source = SamplerSource(
            base_model=checkpoint.base_model,
            directory=self._context.storage.checkpoint_path(checkpoint.id, checkpoint.place),
            key=checkpoint.place,
            tenant_id=scope,
        )
        return SampleOrigin(source, checkpoint)


def _is_replaced_by_other_tenant(checkpoint: CheckpointRecord, job: JobRecord) -> bool:
    """Return whether another tenant replaced the weights after the caller's access check."""
    return checkpoint.tenant_id != job.tenant_id and checkpoint.created_at > job.created_at


def _sample_outcome(
    sample: _RunningSample, response: types.SampleResponse | EngineFailure
) -> JobOutcome:
    if isinstance(response, EngineFailure):
        return Failed(message=response.message, category=response.category)
    num_prompt_tokens, num_cached = sample.request.prompt.length, response.prompt_cache_hit_tokens
    num_sampled = sum(
        len(sequence.tokens_np) if sequence.tokens_np is not None else 0
        for sequence in response.sequences
    )
    amounts = {
        "prefill": num_prompt_tokens - num_cached,
        "prefill_cached": num_cached,
        "sample": num_sampled,
    }
    return Completed(
        result=encode_sample_response(response),
        num_tokens=num_prompt_tokens + num_sampled,
        metrics={"sampled_tokens": float(num_sampled)},
        effects=_usage_effects(sample, amounts),
    )


def _usage_effects(sample: _RunningSample, amounts: Mapping[str, int]) -> tuple[Effect, ...]:
    return tuple(
        count_usage(
            sample.job,
            run_id=sample.origin.run_id,
            base_model=sample.origin.source.base_model,
            kind=kind,
            amount=amount,
        )
        for kind, amount in amounts.items()
        if sample.job.tenant_id != INTERNAL_TENANT
    )
