"""Samples: what they are drawn from, and what is told of them."""

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
    """What a sample is drawn from, and which run it is counted for."""

    __slots__ = ("path", "run_id", "source")

    def __init__(self, source: SamplerSource, run_id: str = "", path: str = "") -> None:
        self.source = source
        self.run_id = run_id
        self.path = path


class ActiveSamples:
    """The samples that are being drawn."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._running: dict[str, tuple[JobRecord, SampleOrigin, int, float]] = {}
        self._origins: OrderedDict[str, SampleOrigin] = OrderedDict()

    @property
    def job_ids(self) -> list[str]:
        """The ids of promises that are being kept."""
        return list(self._running)

    @property
    def running_jobs(self) -> list[JobRecord]:
        """The jobs that are being done."""
        return [job for job, *_ in self._running.values()]

    @property
    def is_exclusive(self) -> bool:
        """Whether one is being drawn that nobody else may be harmed by."""
        return any(job.attempts for job, *_ in self._running.values())

    def start(self, job: JobRecord, payload: bytes) -> Failed | None:
        """Hand a sample to the engine, or say why not."""
        try:
            request = job_types.decode_payload(payload, types.SampleRequest)
            origin = self._find_origin(job, request)
            self._context.engine.start_sample(job.id, origin.source, request)
        except StoreError:
            # The sample is not to blame: it is drawn when the worker begins again.
            raise
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            return to_failed(error, job.kind)
        self._running[job.id] = (job, origin, request.prompt.length, clock.now())
        return None

    def step(self) -> list[tuple[JobRecord, float, JobOutcome]]:
        """Go on with all samples a little; returns those that are over, and when they began."""
        over = []
        for finished in self._context.engine.step_samples():
            entry = self._running.pop(finished.job_id, None)
            if entry is not None:
                job, origin, num_prompt, started_at = entry
                over.append((job, started_at, _sample_outcome(job, origin, num_prompt, finished)))
        return over

    def cancel(self, job_id: str) -> None:
        """Stop a sample that nobody waits for."""
        if self._running.pop(job_id, None) is not None:
            self._context.engine.cancel_sample(job_id)

    def _find_origin(self, job: JobRecord, request: types.SampleRequest) -> SampleOrigin:
        known = self._origins.get(job.sampler_id or "")
        if known is not None and _has_files(known.source):
            return known
        origin = self._context.database.read(lambda db: self._query_origin(db, job, request))
        if origin.source.directory is not None:
            self._context.verified_checkpoints.verify(origin.source.directory, origin.path)
        # A path may stand for other weights tomorrow; a sampling session never does.
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
            found = checkpoints.find_by_id(db, checkpoint_id, now)
            if found is None and sampler.model_path is None:
                raise InvalidInput(
                    f"the weights of sampling session {sampler.id} were deleted: a model keeps the "
                    f"{self._context.max_unnamed_weights} unnamed sampler weights that were "
                    "used last; save "
                    "the weights again, or save them under a name to keep them"
                )
        elif request.model_path is not None:
            found = checkpoints.find(db, parse_tinker_path(request.model_path), now)
            if found is not None and _is_replaced_by_other_tenant(found, job):
                found = None
        else:
            return SampleOrigin(SamplerSource(base_model=request.base_model or "", tenant_id=scope))
        if found is None:
            raise InvalidInput("the weights to sample from were deleted or have expired")
        directory = self._context.home.checkpoint_directory(found.id)
        source = SamplerSource(base_model=found.base_model, directory=directory, tenant_id=scope)
        return SampleOrigin(source, found.run_id, str(found.path))


def _has_files(source: SamplerSource) -> bool:
    """Whether the files of a source were not deleted since they were found."""
    return source.directory is None or source.directory.is_dir()


def _is_replaced_by_other_tenant(found: CheckpointRecord, job: JobRecord) -> bool:
    """Whether these are not the weights that the caller was allowed to read, but later ones."""
    return found.tenant_id != job.tenant_id and found.created_at > job.created_at


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
