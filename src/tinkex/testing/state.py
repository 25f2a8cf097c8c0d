"""Everything the stub server knows: sessions, models, samplers, checkpoints and promises."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import msgspec

from tinkex import clock
from tinkex.engine.fake.bigram import Bigram, BigramTrainer
from tinkex.engine.fake.sampler import BigramSampler
from tinkex.errors import InvalidInput
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.dialects import Dialect
from tinkex.testing.ledger import Account, Ledger
from tinkex.testing.progress import Progress
from tinkex.testing.promises import Job, Promises, Turns, Work
from tinkex.testing.tenants import Tenants
from tinkex.testing.timers import LoopClock, wake
from tinkex.testing.weights import Checkpoint, Recipe, Vault
from tinkex.wire.codec import decode_json

RequestT = TypeVar("RequestT")
_MAX_COMPLETIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StubConfig:
    """How the stub server behaves."""

    dialect: Dialect
    client_config: Mapping[str, Any] = field(default_factory=dict)
    """Flags answered to POST client/config."""
    dynamic_config: Mapping[str, Any] = field(default_factory=dict)
    """Flags answered to POST client/dynamic_config."""
    models: tuple[str, ...] = ("tinkex/bigram",)
    """Base models that can be trained and sampled."""
    long_poll_seconds: float = 5.0
    """How long retrieve_future waits for a result."""
    work_seconds: float = 0.0
    """How long each operation takes."""
    gap_seconds: float = 1.0
    """How long an operation waits for one with a lower number."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """A client's session."""

    session_id: str
    tenant: str
    created_at: datetime
    tags: list[str] = field(default_factory=list)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    project_id: str = "default"
    display_name: str | None = None
    sdk_version: str = ""
    heartbeats: list[float] = field(default_factory=list)
    """When heartbeats arrived, on the monotonic clock."""
    finish_reason: str | None = None
    finish_detail: str | None = None
    num_trace_requests: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Model:
    """A model in training: what lists call a training run."""

    model_id: str
    tenant: str
    session: Session
    recipe: Recipe
    trainer: BigramTrainer
    turns: Turns
    account: Account
    user_metadata: Mapping[str, Any] | None = None
    last_request_at: datetime = field(default_factory=clock.utc_now)
    is_unloaded: bool = False
    progress: Progress = field(default_factory=Progress)


class Completions:
    """Finished samples of one sampling client, in the order they finished."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque(maxlen=_MAX_COMPLETIONS)
        self.num_total = 0
        self.waiters: set[asyncio.Future[bool]] = set()

    def add(self, job: Job) -> None:
        """Enter a job that is over, and wake whoever polls."""
        self.jobs.append(job)
        self.num_total += 1
        if self.waiters:
            wake(self.waiters)

    def since(self, cursor: int) -> list[Job]:
        """What finished after this cursor."""
        num_new = max(0, self.num_total - cursor)
        return list(self.jobs)[-num_new:] if num_new else []


@dataclass(slots=True, eq=False, kw_only=True)
class SamplingSession:
    """A model that can be sampled."""

    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None
    sampler: BigramSampler
    account: Account
    num_clones: int = 0
    completions: dict[int, Completions] = field(default_factory=dict)


class World:
    """The state of one stub server; only its own thread changes it."""

    def __init__(self, config: StubConfig, tenants: Tenants) -> None:
        self.config = config
        self.dialect = config.dialect
        self.tenants = tenants
        self.url = ""
        self.clock = LoopClock()
        self.promises = Promises()
        self.vault = Vault()
        self.ledger = Ledger()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.executed: list[tuple[str, int | None, str]] = []
        self.repeats: dict[tuple[str, str, str], Answer] = {}
        self.dice = random.Random(0)
        self._bases: dict[str, Bigram] = {}

    # --- requests ---------------------------------------------------------------------------
    def read(self, call: Call, type_: type[RequestT]) -> RequestT:
        """The request as its type, or 422 with the reason."""
        try:
            return decode_json(call.body or b"{}", type_)
        except (msgspec.DecodeError, InvalidInput) as error:
            raise Refusal(422, f"{call.endpoint}: {error}") from None

    def session(self, tenant: str, session_id: str) -> Session:
        """A session of this tenant, or 404."""
        return _owned(self.sessions.get(session_id), tenant, "session", session_id)

    def model(self, tenant: str, model_id: str) -> Model:
        """A model of this tenant that is loaded, or 404."""
        model = _owned(self.models.get(model_id), tenant, "model", model_id)
        if model.is_unloaded:
            raise Refusal(404, f"model {model_id!r} was unloaded")
        model.last_request_at = clock.utc_now()
        return model

    def sampler(self, tenant: str, sampler_id: str) -> SamplingSession:
        """A sampling session of this tenant, or 404."""
        return _owned(self.samplers.get(sampler_id), tenant, "sampling session", sampler_id)

    def checkpoint(self, tenant: str, path: str, access_token: str | None = None) -> Checkpoint:
        """A checkpoint this tenant may read: its own, a public one, or with its owner's key."""
        found = self.vault.find(path)
        readers = {tenant}
        if access_token is not None:
            readers.add(self.tenants.identify(access_token))
        if found is None or not (found.is_public or found.tenant in readers):
            raise Refusal(404, f"there is no checkpoint {path!r}")
        return found

    def own_checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        """A checkpoint of this tenant's run, or 404."""
        path = f"tinker://{run_id}/{checkpoint_id}"
        return _owned(self.vault.find(path), tenant, "checkpoint", path)

    def base_model(self, name: str) -> Bigram:
        """The weights of a base model, or 400 if this server has no such model."""
        if name not in self.config.models:
            known = ", ".join(self.config.models)
            raise Refusal(400, f"base model {name!r} is not served here; there is {known}")
        if name not in self._bases:
            self._bases[name] = Bigram.base(name)
        return self._bases[name]

    # --- work -------------------------------------------------------------------------------
    def new_turns(self) -> Turns:
        """The order of work for a new model."""
        return Turns(self.clock, self.config.gap_seconds, self.config.work_seconds)

    def start(self, job: Job, work: Work) -> None:
        """Run work that needs no order."""
        if self.config.work_seconds > 0.0:
            self.clock.later(self.config.work_seconds, lambda: job.run(work))
        else:
            job.run(work)

    def enqueue(
        self, call: Call, model: Model, seq_id: int | None, work: Work, kind: str | None = None
    ) -> Answer:
        """Promise to run a model's work in its turn; a repeated request gets the same promise."""
        key = None if seq_id is None else ("op", model.model_id, seq_id)
        job = self.promises.same(key) if key is not None else None
        if job is None:
            job = self.promises.make(call.tenant, call.endpoint, key)
            model.turns.submit(seq_id, self._turn(job, model, seq_id, work, kind or call.endpoint))
        return self.promise(job, model.model_id)

    def _turn(
        self, job: Job, model: Model, seq_id: int | None, work: Work, kind: str
    ) -> Callable[[], None]:
        def run() -> None:
            self.executed.append((model.model_id, seq_id, kind))
            job.run(work)

        return run

    def promise(self, job: Job, model_id: str | None = None) -> Answer:
        """The answer that names a promise."""
        content: dict[str, Any] = {"request_id": job.request_id}
        if self.dialect.long_promises:
            content |= {"future_id": job.request_id, "status": "pending"}
        if model_id is not None:
            content["model_id"] = model_id
        if job.sequence_ids is not None and self.dialect.names_sequences:
            content["sample_sequence_ids"] = job.sequence_ids
        return json_answer(content)


Handler: TypeAlias = Callable[[World, Call], Answer | Awaitable[Answer]]


def once_per_key(handler: Callable[[World, Call], Answer]) -> Handler:
    """Answer a repeated idempotency key with the first answer, without doing the work again."""

    def repeatable(world: World, call: Call) -> Answer:
        given = call.headers.get("x-idempotency-key")
        if given is None:
            return handler(world, call)
        key = (call.tenant, call.endpoint, given)
        if key not in world.repeats:
            world.repeats[key] = handler(world, call)
        return world.repeats[key]

    return repeatable


OwnedT = TypeVar("OwnedT", Session, Model, SamplingSession, Checkpoint)


def _owned(found: OwnedT | None, tenant: str, what: str, name: str) -> OwnedT:
    # What belongs to somebody else is not there: 403 would tell that it exists.
    if found is None or found.tenant != tenant:
        raise Refusal(404, f"there is no {what} {name!r}")
    return found
