"""Sampling sessions and samples."""

from __future__ import annotations

from tinkex import types
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.sampler import BigramSampler
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.ledger import PREFILL, SAMPLE
from tinkex.testing.promises import Job
from tinkex.testing.state import Completions, Handler, SamplingSession, Session, World

#: A clone of a sampling client counts its requests from its own number times this.
CLONE_STRIDE = 1_000_000_000


def create_sampling_session(world: World, call: Call) -> Answer:
    """Open a sampling session; the same number in the same session is the same one."""
    request = world.read(call, types.CreateSamplingSessionRequest)
    session = world.session(call.tenant, request.session_id)
    sampler_id = sampler_id_of(session, request.sampling_session_seq_id)
    if sampler_id not in world.samplers:
        model, base_model = _source(world, call, request.base_model, request.model_path)
        add_sampling_session(
            world,
            session,
            request.sampling_session_seq_id,
            model,
            base_model=base_model,
            model_path=request.model_path,
        )
    return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})


def sampler_id_of(session: Session, seq_id: int) -> str:
    """The id of a session's nth sampling session."""
    return f"{session.session_id}:sample:{seq_id}"


def _source(
    world: World, call: Call, base_model: str | None, model_path: str | None
) -> tuple[Bigram, str]:
    if model_path is not None:
        checkpoint = world.checkpoint(call.tenant, model_path)
        return checkpoint.model, checkpoint.recipe.base_model
    if base_model is None:
        raise Refusal(422, f"{call.endpoint} needs base_model or model_path")
    return world.base_model(base_model), base_model


def add_sampling_session(
    world: World,
    session: Session,
    seq_id: int,
    model: Bigram,
    *,
    base_model: str,
    model_path: str | None = None,
) -> SamplingSession:
    """Make a sampling session of these weights, as they are now."""
    sampling = SamplingSession(
        sampler_id=sampler_id_of(session, seq_id),
        tenant=session.tenant,
        session_id=session.session_id,
        base_model=base_model,
        model_path=model_path,
        sampler=BigramSampler(model),
        account=world.ledger.account(session.tenant, session.session_id, base_model),
    )
    world.samplers[sampling.sampler_id] = sampling
    return sampling


def join_sampling_session(world: World, call: Call) -> Answer:
    """Give another client of a sampling session its own number."""
    request = world.read(call, types.JoinSamplingSessionRequest)
    sampling = world.sampler(call.tenant, request.sampling_session_id)
    sampling.num_clones += 1
    return json_answer({"type": "join_sampling_session", "client_counter": sampling.num_clones})


def get_sampler(world: World, call: Call) -> Answer:
    """Say what a sampling session samples from."""
    sampling = world.sampler(call.tenant, call.ids["sampler_id"])
    content = {"sampler_id": sampling.sampler_id, "base_model": sampling.base_model}
    if sampling.model_path is not None:
        content["model_path"] = sampling.model_path
    return json_answer(content)


def sample(world: World, call: Call) -> Answer:
    """Promise samples; the same number in the same sampling session is the same promise."""
    request = world.read(call, types.SampleRequest)
    sampling = _sampling_session(world, call, request)
    seq_id = request.seq_id
    key = None if seq_id is None else ("sample", sampling.sampler_id, seq_id)
    job = world.promises.same(key) if key is not None else None
    if job is None:
        job = world.promises.make(call.tenant, call.endpoint, key)
        job.sequence_ids = [f"{job.request_id}:{index}" for index in range(request.num_samples)]
        _watch(job, sampling, seq_id or 0)
        world.start(job, lambda: _draw(world, sampling, request))
    return world.promise(job)


def _sampling_session(world: World, call: Call, request: types.SampleRequest) -> SamplingSession:
    if request.sampling_session_id is not None:
        return world.sampler(call.tenant, request.sampling_session_id)
    model, base_model = _source(world, call, request.base_model, request.model_path)
    return SamplingSession(
        sampler_id="",
        tenant=call.tenant,
        session_id="",
        base_model=base_model,
        model_path=request.model_path,
        sampler=BigramSampler(model),
        account=world.ledger.account(call.tenant, "", base_model),
    )


def _draw(
    world: World, sampling: SamplingSession, request: types.SampleRequest
) -> types.SampleResponse:
    response = sampling.sampler.sample(request, world.dice)
    num_sampled = sum(
        0 if sequence.tokens_np is None else len(sequence.tokens_np)
        for sequence in response.sequences
    )
    sampling.account.count(PREFILL, request.prompt.length)
    sampling.account.count(SAMPLE, num_sampled)
    return response


def _watch(job: Job, sampling: SamplingSession, seq_id: int) -> None:
    """Have the job entered among the completions of its client when it is over."""
    clone = seq_id // CLONE_STRIDE
    completions = sampling.completions.get(clone)
    if completions is None:
        completions = sampling.completions[clone] = Completions()
    job.when_over = completions.add


ROUTES: dict[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": sample,
}
