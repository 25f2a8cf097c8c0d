"""Models in training: making one, passes, optimizer steps, and asking about one."""

from __future__ import annotations

from typing import Any

from tinkex import types
from tinkex.errors import InvalidInput
from tinkex.jobs.kinds import JobKind
from tinkex.server.admission import check_pass, model_of
from tinkex.server.base_models import check_trainable, find_model, served_models
from tinkex.server.call import Call, Handler, Services
from tinkex.server.checks import check_number
from tinkex.server.new_models import add_run, new_spec
from tinkex.server.operations import (
    key_of,
    model_id_of,
    submit,
    submit_operation,
    submit_pass,
    use_up_number,
)
from tinkex.server.ownership import open_session_of, run_of, trainable_run_of
from tinkex.server.transactions import read
from tinkex.store.database import Connection
from tinkex.store.records import NewJob


async def create_model(
    services: Services, call: Call[types.CreateModelRequest]
) -> types.UntypedAPIFuture:
    """Promise a new model; the same number in the same session is the same model."""
    request, tenant_id = call.request, call.tenant_id
    check_number("model_seq_id", request.model_seq_id)
    spec = new_spec(request)
    run_id = model_id_of(request.session_id, request.model_seq_id)

    def prepare(db: Connection) -> None:
        session = open_session_of(db, tenant_id, request.session_id)
        check_trainable(db, spec.base_model)
        add_run(db, session, run_id, spec, request.user_metadata)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=request.session_id,
        kind=JobKind.CREATE_MODEL,
        key=key_of("model", tenant_id, request.session_id, request.model_seq_id),
        run_id=run_id,
        position=0,
        payload=call.body,
    )
    return await submit(services, new, prepare)


async def forward_backward(
    services: Services, call: Call[types.ForwardBackwardRequest | types.ForwardRequest]
) -> types.UntypedAPIFuture:
    """Promise a pass, with gradients or, if the message says so, without."""
    # Protobuf has no missing number: an absent one arrives as 0.
    return await _submit_pass(services, call, call.request.seq_id or None)


async def forward(services: Services, call: Call[types.ForwardRequest]) -> types.UntypedAPIFuture:
    """Promise a pass without gradients, as older clients ask for it."""
    return await _submit_pass(services, call, call.request.seq_id)


async def _submit_pass(
    services: Services,
    call: Call[Any],
    seq_id: int | None,
) -> types.UntypedAPIFuture:
    request, model_id = call.request, call.request.model_id
    if isinstance(request, types.ForwardRequest):
        kind, work = JobKind.FORWARD, request.forward_input
    else:
        kind, work = JobKind.FORWARD_BACKWARD, request.forward_backward_input

    def find(db: Connection) -> str:
        return trainable_run_of(db, call.tenant_id, model_id).base_model

    model = await model_of(services, (call.tenant_id, model_id), find)
    try:
        num_tokens = await check_pass(services, work, model)
    except InvalidInput:
        await use_up_number(services, call, kind, model_id, seq_id)
        raise
    return await submit_pass(services, call, kind, model_id, seq_id, num_tokens)


async def optim_step(
    services: Services, call: Call[types.OptimStepRequest]
) -> types.UntypedAPIFuture:
    """Promise an optimizer step."""
    request = call.request
    return await submit_operation(
        services, call, JobKind.OPTIM_STEP, request.model_id, request.seq_id
    )


async def create_custom_loss(
    services: Services, call: Call[types.CreateCustomLossRequest]
) -> types.UntypedAPIFuture:
    """Promise to keep a loss for a session."""
    request, tenant_id = call.request, call.tenant_id
    check_number("custom_loss_seq_id", request.custom_loss_seq_id)

    def prepare(db: Connection) -> None:
        open_session_of(db, tenant_id, request.session_id)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=request.session_id,
        kind=JobKind.CREATE_CUSTOM_LOSS,
        key=key_of("loss", tenant_id, request.session_id, request.custom_loss_seq_id),
        payload=call.body,
    )
    return await submit(services, new, prepare)


async def get_info(services: Services, call: Call[types.GetInfoRequest]) -> types.GetInfoResponse:
    """Describe a model."""

    def look(db: Connection) -> types.GetInfoResponse:
        run = run_of(db, call.tenant_id, call.request.model_id)
        base = find_model(served_models(db), run.base_model)
        name = run.base_model
        return types.GetInfoResponse(
            type="get_info",
            model_id=run.id,
            model_data=types.ModelData(
                arch=base.arch if base is not None else None,
                model_name=name,
                tokenizer_id=(base.tokenizer_id if base is not None else None) or name,
            ),
            optimizer_config=run.spec["optimizer"],
            is_lora=True,
            lora_rank=run.spec["rank"],
            model_name=name,
        )

    return await read(services, look)


async def unload_model(
    services: Services, call: Call[types.UnloadModelRequest]
) -> types.UntypedAPIFuture:
    """Promise to forget a model's live state, after what was promised before."""
    return await submit_operation(services, call, JobKind.UNLOAD_MODEL, call.request.model_id, None)


ROUTES: dict[str, Handler] = {
    "create_model": create_model,
    "forward_backward": forward_backward,
    "forward": forward,
    "optim_step": optim_step,
    "create_custom_loss": create_custom_loss,
    "get_info": get_info,
    "unload_model": unload_model,
}
