"""Running samples: their weights, and their results."""

from __future__ import annotations

from collections import OrderedDict

from tinkex import clock, types
from tinkex.engine.protocol import FinishedSample, SamplerSource
from tinkex.errors import InvalidInput, StoreError
from tinkex.ids import parse_tinker_path
from tinkex.jobs import job_types
from tinkex.jobs.job_types import Completed, Failed, JobOutcome, to_failed
from tinkex.jobs.result_log import count_usage
from tinkex.jobs.worker_context import WorkerContext
from tinkex.store import checkpoints, samplers
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, JobRecord
from tinkex.wire.proto import encode_sample_response

_MAX_CACHED_ORIGINS = 1024


class SampleOrigin:
    """The weights of a sample, and the run that its usage is counted for."""

    __slots__ = ("path", "run_id", "source")

    def __init__(self, source: SamplerSource, run_id: str = "", path: str = "") -> None:
        self.source = source
        self.run_id = run_id
        self.path = path


class ActiveSamples:
    """The samples that run in the engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._running: dict[str, tuple[JobRecord, SampleOrigin, int, float]] = {}
        self._origins: OrderedDict[str, SampleOrigin] = OrderedDict()

    @property
    def job_ids(self) -> list[str]:
        """The ids of the running jobs."""
        return list(self._running)

    @property
    def running_jobs(self) -> list[JobRecord]:
        """The running jobs."""
        return [job for job, *_ in self._running.values()]

    @property
    def is_exclusive(self) -> bool:
        """Whether a retried sample runs, which must run alone."""
        return any(job.attempts for job, *_ in self._running.values())

    def start(self, job: JobRecord, payload: bytes) -> Failed | None:
        """Start a sample in the engine; returns the failure if that is impossible."""
        try:
            request = job_types.decode_payload(payload, types.SampleRequest)
            origin = self._find_origin(job, request)
            self._context.engine.start_sample(job.id, origin.source, request)
        except StoreError:
            # Not the sample's fault: it runs again after the worker restarts.
            raise
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            return to_failed(error, job.kind)
        self._running[job.id] = (job, origin, request.prompt.length, clock.now())
        return None

    def step(self) -> list[tuple[JobRecord, float, JobOutcome]]:
        """Run one engine step; returns finished jobs with their start time and outcome."""
        results = []
        for finished in self._context.engine.step_samples():
            entry = self._running.pop(finished.job_id, None)
            if entry is not None:
                job, origin, num_prompt, started_at = entry
                results.append(
                    (job, started_at, _sample_outcome(job, origin, num_prompt, finished))
                )
        return results

    def cancel(self, job_id: str) -> None:
        """Stop a running sample."""
        if self._running.pop(job_id, None) is not None:
            self._context.engine.cancel_sample(job_id)

    def _find_origin(self, job: JobRecord, request: types.SampleRequest) -> SampleOrigin:
        cached = self._origins.get(job.sampler_id or "")
        if cached is not None and _has_files(cached.source):
            return cached
        origin = self._context.database.read(lambda db: self._query_origin(db, job, request))
        if origin.source.directory is not None:
            self._context.verified_checkpoints.verify(origin.source.directory, origin.path)
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
        elif request.model_path is not None:
            checkpoint = checkpoints.find(db, parse_tinker_path(request.model_path), now)
            if checkpoint is not None and _is_replaced_by_other_tenant(checkpoint, job):
                checkpoint = None
        else:
            return SampleOrigin(SamplerSource(base_model=request.base_model or "", tenant_id=scope))
        if checkpoint is None:
            raise InvalidInput("the weights to sample from were deleted or have expired")
        directory = self._context.home.checkpoint_directory(checkpoint.id)
        source = SamplerSource(
            base_model=checkpoint.base_model, directory=directory, tenant_id=scope
        )
        return SampleOrigin(source, checkpoint.run_id, str(checkpoint.path))


def _has_files(source: SamplerSource) -> bool:
    """Return whether the files of a source still exist."""
    return source.directory is None or source.directory.is_dir()


def _is_replaced_by_other_tenant(checkpoint: CheckpointRecord, job: JobRecord) -> bool:
    """Return whether another tenant replaced the weights after the caller's access check."""
    return checkpoint.tenant_id != job.tenant_id and checkpoint.created_at > job.created_at


def _sample_outcome(
    job: JobRecord, origin: SampleOrigin, num_prompt_tokens: int, finished: FinishedSample
) -> JobOutcome:
    response = finished.outcome
    if not isinstance(response, types.SampleResponse):
        return Failed(message=response.message, category=response.category)
    num_cached = response.prompt_cache_hit_tokens
    num_sampled = sum(
        len(sequence.tokens_np) if sequence.tokens_np is not None else 0
        for sequence in response.sequences
    )
    amounts = {
        "prefill": num_prompt_tokens - num_cached,
        "prefill_cached": num_cached,
        "sample": num_sampled,
    }
    effects = tuple(
        count_usage(
            job,
            run_id=origin.run_id,
            base_model=origin.source.base_model,
            kind=kind,
            amount=amount,
        )
        for kind, amount in amounts.items()
    )
    return Completed(
        result=encode_sample_response(response),
        num_tokens=num_prompt_tokens + num_sampled,
        metrics={"sampled_tokens": float(num_sampled)},
        effects=effects,
    )
