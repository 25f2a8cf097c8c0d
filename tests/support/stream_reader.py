"""The part of an API process that follows samples, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from tinkex import types
from tinkex.engine.protocol import SampleProgress
from tinkex.jobs.future_waiters import FutureWaiters
from tinkex.jobs.job_types import JobKind
from tinkex.jobs.queue import JobQueue, QueueLimits
from tinkex.jobs.token_streams import TokenStream, TokenStreams
from tinkex.jobs.wakeup import WakeupListener
from tinkex.store.database import Database
from tinkex.store.records import JobRecord, NewJob
from tinkex.store.settings import get_or_create_secret
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import decode_sample_response

BASE_MODEL = "tinkex/bigram"


@dataclass
class CollectedTokens:
    """What a client would have received."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    num_messages: int = 0

    def add(self, progress: Iterable[SampleProgress]) -> None:
        """Append tokens; an offset that is not the expected one is an error of the stream."""
        for each in progress:
            known = self.tokens.setdefault(each.sequence, [])
            assert each.offset == len(known), each
            assert each.tokens
            known += each.tokens
            self.logprobs.setdefault(each.sequence, []).extend(each.logprobs)
            self.num_messages += 1

    def assert_equals(self, response: types.SampleResponse) -> None:
        """Everything was received exactly once, as it is in the store."""
        stored = dict(enumerate(response.sequences))
        assert {k: v for k, v in self.tokens.items() if v} == {
            k: s.tokens for k, s in stored.items() if s.tokens
        }
        for index, logprobs in self.logprobs.items():
            assert logprobs == stored[index].logprobs


@dataclass(frozen=True)
class StreamReader:
    """Submits samples and follows them."""

    queue: JobQueue
    streams: TokenStreams
    waiters: FutureWaiters
    process_id: str

    def submit(
        self,
        tenant_id: str,
        *,
        max_tokens: int = 32,
        num_samples: int = 1,
        seed: int | None = 1,
        topk: int = 0,
        process_id: str | None = None,
        base_model: str = BASE_MODEL,
        prompt: Iterable[int] = (1, 2, 3),
    ) -> JobRecord:
        """Submit a sample of a base model, as an inference endpoint does."""
        params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
        request = types.SampleRequest(
            prompt=types.ModelInput.from_ints(list(prompt)),
            sampling_params=params,
            num_samples=num_samples,
            base_model=base_model,
            topk_sample_logprobs=topk,
        )
        new = NewJob(
            id="",
            tenant_id=tenant_id,
            session_id="",
            kind=JobKind.SAMPLE,
            key=None,
            position=0,
            payload=encode_json(request),
            num_sequences=num_samples,
            num_tokens=max_tokens,
            base_model=base_model,
            process_id=process_id,
        )
        return self.queue.submit(new).result(60)

    def stored(self, job: JobRecord) -> types.SampleResponse:
        """The stored result of a finished job."""
        outcome = self.queue.find_with_result(job.tenant_id, job.id)
        assert outcome.result is not None, outcome.job
        return decode_sample_response(outcome.result)

    async def collect(self, job: JobRecord) -> CollectedTokens:
        """Follow a job to its end and compare with the stored result."""
        collected = CollectedTokens()
        stream = self.streams.follow(job.id)
        async for progress in stream:
            collected.add([progress])
        return self.finish(job, stream, collected)

    def finish(
        self, job: JobRecord, stream: TokenStream, collected: CollectedTokens
    ) -> CollectedTokens:
        """Take the rest from the store."""
        response = self.stored(job)
        collected.add(stream.rest(response.sequences))
        collected.assert_equals(response)
        return collected


@contextlib.asynccontextmanager
async def open_reader(store_url: str, **options: object) -> AsyncIterator[StreamReader]:
    """Register an API process that only follows samples."""
    database = Database(store_url)
    secret = database.write(get_or_create_secret)
    listener = WakeupListener(database, "api")
    queue = JobQueue(database, QueueLimits(), secret)
    waiters = FutureWaiters(queue, listener)
    waiters.start()
    streams = TokenStreams(database, queue, waiters, secret, **options)  # type: ignore[arg-type]
    try:
        yield StreamReader(queue, streams, waiters, listener.process.id)
    finally:
        await streams.close()
        await waiters.close()
        queue.close()
        listener.close()
        database.close()
