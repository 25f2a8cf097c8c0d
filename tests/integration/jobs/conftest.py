"""Test harness: a store, a job queue and a worker with the fake engine, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tinkex import types
from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.blobs import BlobStore
from tinkex.checkpoint.places import payload_place
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import AdapterSpec
from tinkex.home import Home
from tinkex.ids import new_id
from tinkex.jobs.job_types import JobKind, LoadPayload
from tinkex.jobs.queue import JobQueue, QueueLimits
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.store import jobs, keys, runs, samplers, sessions
from tinkex.store.database import Connection, Database
from tinkex.store.migrations import migrate
from tinkex.store.records import (
    JobRecord,
    NewJob,
    RunRecord,
    RunState,
    SamplerRecord,
    SessionRecord,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import encode_forward_backward_request

BASE_MODEL = "tinkex/bigram"
SECRET = b"test secret"


class WorkerHarness:
    """A store with tenants, and a worker that can be stopped and started."""

    def __init__(self, root: Path, *, blobs_url: str = "", **worker_options: Any) -> None:
        self.home = Home(root)
        """The home of the next worker."""
        self.blobs_url = blobs_url
        self.url = f"sqlite:///{root / 'store.db'}"
        self.database = Database(self.url)
        migrate(self.database)
        self.queue = JobQueue(self.database, QueueLimits(), SECRET)
        self.options = worker_options
        self.engine = FakeEngine([BASE_MODEL])
        self.worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._worker_database: Database | None = None

    # --- the worker ---------------------------------------------------------------------------
    def start(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine([BASE_MODEL])
        self._worker_database = Database(self.url)
        self.worker = Worker(
            database=self._worker_database,
            engine=self.engine,
            home=self.home,
            config=WorkerConfig(owner="test", **self.options),
            blobs=self.open_blobs() if self.blobs_url else None,
        )
        self._thread = threading.Thread(target=self.worker.run, daemon=True)
        self._thread.start()

    def open_blobs(self, max_bytes: int = 1 << 30) -> BlobCache:
        return BlobCache(BlobStore(self.blobs_url), self.home.blob_cache, max_bytes)

    def stop(self) -> None:
        if self.worker is not None and self._thread is not None:
            self.worker.stop()
            self._thread.join(120)
            assert not self._thread.is_alive()
            assert self._worker_database is not None
            self._worker_database.close()
        self.worker = self._thread = None

    def kill(self) -> None:
        """End the worker like a crash: without snapshots; the next one finds its jobs running."""
        assert self.worker is not None
        self.worker._snapshots.snapshot_and_wait = lambda resident: False
        self.stop()

    def close(self) -> None:
        self.stop()
        self.queue.close()
        self.database.close()

    # --- client operations -----------------------------------------------------------------------
    def tenant(self, name: str = "alice") -> str:
        return self.database.write(lambda db: keys.get_or_create_tenant(db, name, time.time())).id

    def session(self, tenant_id: str) -> str:
        now = time.time()
        session = SessionRecord(
            id=new_id(),
            tenant_id=tenant_id,
            project_id="default",
            display_name=None,
            tags=[],
            user_metadata={},
            sdk_version="test",
            created_at=now,
            seen_at=now,
        )
        self.database.write(lambda db: sessions.insert(db, session))
        return session.id

    def model(
        self, tenant_id: str, session_id: str, number: int = 0, optimizer: str = "adamw"
    ) -> str:
        run_id = f"{session_id}:train:{number}"
        now = time.time()
        run = RunRecord(
            id=run_id,
            tenant_id=tenant_id,
            session_id=session_id,
            base_model=BASE_MODEL,
            spec=asdict(
                AdapterSpec(base_model=BASE_MODEL, rank=8, seed=1, optimizer={"type": optimizer})
            ),
            user_metadata=None,
            state=RunState.CREATING,
            created_at=now,
            used_at=now,
        )
        new = self._new_job(tenant_id, session_id, JobKind.CREATE_MODEL, f"model:{run_id}", b"{}")
        self._submit(new, run_id, 0, prepare=lambda db: runs.insert(db, run))
        return run_id

    def op(
        self, run_id: str, seq: int | None, kind: JobKind, payload: bytes, **options: Any
    ) -> JobRecord:
        run = self.run(run_id)
        key = None if seq is None else f"op:{run_id}:{seq}"
        new = self._new_job(run.tenant_id, run.session_id, kind, key, payload, **options)
        return self._submit(new, run_id, seq)

    def forward_backward(self, run_id: str, seq: int, tokens: list[int]) -> JobRecord:
        inputs = types.ForwardBackwardInput([datum(tokens)], "cross_entropy")
        request = types.ForwardBackwardRequest(inputs, run_id, seq)
        body = encode_forward_backward_request(request, False)
        return self.op(run_id, seq, JobKind.FORWARD_BACKWARD, body, is_proto=True)

    def forward_backward_in_blobs(
        self, run_id: str, seq: int, tokens: list[int], payload: bytes | None = None
    ) -> JobRecord:
        """A pass whose payload is in the object store, as an API process puts it there."""
        if payload is None:
            inputs = types.ForwardBackwardInput([datum(tokens)], "cross_entropy")
            request = types.ForwardBackwardRequest(inputs, run_id, seq)
            payload = encode_forward_backward_request(request, False)
        place = payload_place(payload)
        BlobStore(self.blobs_url).create_payload(place, payload)
        options = {"payload_ref": place, "payload_bytes": len(payload), "is_proto": True}
        return self.op(run_id, seq, JobKind.FORWARD_BACKWARD, b"", **options)

    def optim_step(self, run_id: str, seq: int, learning_rate: float = 0.1) -> JobRecord:
        params: types.OptimParams = types.AdamParams(learning_rate=learning_rate)
        if self.run(run_id).spec["optimizer"]["type"] == "dimuon":
            params = types.DimuonParams(learning_rate=learning_rate)
        request = types.OptimStepRequest(optim_params=params, model_id=run_id, seq_id=seq)
        return self.op(run_id, seq, JobKind.OPTIM_STEP, encode_json(request))

    def save(self, run_id: str, seq: int, name: str, **options: Any) -> JobRecord:
        request = types.SaveWeightsRequest(model_id=run_id, path=name, seq_id=seq, **options)
        return self.op(run_id, seq, JobKind.SAVE_WEIGHTS, encode_json(request))

    def load(
        self,
        run_id: str,
        seq: int,
        checkpoint_id: str,
        path: str = "tinker://a/b/c",
        place: str = "",
    ) -> JobRecord:
        payload = LoadPayload(
            path=path, checkpoint_id=checkpoint_id, with_optimizer=True, place=place
        )
        return self.op(run_id, seq, JobKind.LOAD_WEIGHTS, encode_json(payload))

    def sampler(self, tenant_id: str, session_id: str, checkpoint_id: str | None = None) -> str:
        sampler = SamplerRecord(
            id=f"{session_id}:sample:{new_id()}",
            tenant_id=tenant_id,
            session_id=session_id,
            base_model=BASE_MODEL,
            model_path=None,
            checkpoint_id=checkpoint_id,
            created_at=time.time(),
        )
        self.database.write(lambda db: samplers.insert(db, sampler))
        return sampler.id

    def sample(
        self, sampler_id: str, seq: int, *, seed: int = 1, max_tokens: int = 8, num_tokens: int = 0
    ) -> JobRecord:
        sampler = self.database.read(lambda db: samplers.find(db, sampler_id))
        assert sampler is not None
        request = types.SampleRequest(
            prompt=types.ModelInput.from_ints([1, 2, 3]),
            sampling_params=types.SamplingParams(max_tokens=max_tokens, seed=seed),
            sampling_session_id=sampler_id,
            seq_id=seq,
        )
        new = NewJob(
            id="",
            tenant_id=sampler.tenant_id,
            session_id=sampler.session_id,
            kind=JobKind.SAMPLE,
            key=f"sample:{sampler_id}:{seq}",
            sampler_id=sampler_id,
            position=seq,
            payload=encode_json(request),
            num_sequences=1,
            num_tokens=num_tokens,
            base_model=sampler.base_model,
        )
        return self.queue.submit(new).result()

    def _new_job(
        self,
        tenant_id: str,
        session_id: str,
        kind: JobKind,
        key: str | None,
        payload: bytes,
        **options: Any,
    ) -> NewJob:
        return NewJob(
            id="",
            tenant_id=tenant_id,
            session_id=session_id,
            kind=kind,
            key=key,
            payload=payload,
            **options,
        )

    def _submit(self, new: NewJob, run_id: str, seq: int | None, prepare: Any = None) -> JobRecord:
        return self.queue.submit(replace(new, run_id=run_id, position=seq), prepare).result()

    # --- results ---------------------------------------------------------------------------------
    def run(self, run_id: str) -> RunRecord:
        run = self.database.read(lambda db: runs.find(db, run_id))
        assert run is not None
        return run

    def outcome(self, job: JobRecord, seconds: float = 120.0) -> jobs.JobWithResult:
        """Wait for a job; the test fails if it does not finish."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            outcome = self.queue.find_with_result(job.tenant_id, job.id)
            if outcome.job.is_finished:
                return outcome
            time.sleep(0.005)
        raise AssertionError(f"{job.kind} {job.position} is still {outcome.job.state}")

    def result(self, job: JobRecord) -> bytes:
        outcome = self.outcome(job)
        assert outcome.job.error is None, outcome.job.error
        assert outcome.result is not None
        return outcome.result

    def read(self, work: Any) -> Any:
        return self.database.read(work)


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WorkerHarness]:
    worker_harness = WorkerHarness(tmp_path)
    yield worker_harness
    worker_harness.close()


def count(database: Database, statement: Any) -> int:
    def work(db: Connection) -> int:
        return db.scalar(statement) or 0

    return database.read(work)
