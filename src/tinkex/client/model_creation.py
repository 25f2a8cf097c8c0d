"""Create training clients, for a new model or from a checkpoint, and upload custom losses."""

from __future__ import annotations

from tinkex import types
from tinkex.client.custom_loss import LossHandle, TracedLoss, encode_graph
from tinkex.client.holder import Holder
from tinkex.client.polling import Poller
from tinkex.client.queue_state import QueueStateLogger
from tinkex.client.retry import NO_RETRY
from tinkex.client.submission import run_job
from tinkex.client.training import TrainingClient
from tinkex.errors import InvalidInput, TinkexError, UnprocessableEntityError
from tinkex.ids import parse_tinker_path
from tinkex.logs import get_logger
from tinkex.wire.endpoints import (
    CREATE_CUSTOM_LOSS,
    CREATE_MODEL,
    LOAD_WEIGHTS,
    UNLOAD_MODEL,
    WEIGHTS_INFO,
)
from tinkex.wire.messages import WeightsInfoRequest

logger = get_logger(__name__)


async def create_model(
    holder: Holder,
    base_model: str,
    lora: types.LoraConfig,
    user_metadata: dict[str, str] | None,
    optimizer: types.OptimizerConfig | None,
) -> TrainingClient:
    """Create a new model and wait until it is ready."""
    session_id = await holder.session_id()
    model_seq_id = holder.next_model_seq_id()
    message = types.CreateModelRequest(
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=base_model,
        lora_config=lora,
        optimizer_config=optimizer or types.AdamOptimizerConfig(),
        user_metadata=user_metadata,
    )
    fields: dict[str, object] = {name: getattr(message, name) for name in message.__struct_fields__}
    if optimizer is None:
        # AdamW is the default; servers before 0.36 do not know the field.
        del fields["optimizer_config"]
    body = {name: value for name, value in fields.items() if value is not None}
    reply = await run_job(_training_poller(holder, base_model), CREATE_MODEL, body)
    logger.info("Model %s is ready", reply.model_id)
    return TrainingClient(holder, model_seq_id, reply.model_id)


async def create_model_from_checkpoint(
    holder: Holder,
    path: str,
    *,
    base_model: str | None = None,
    user_metadata: dict[str, str] | None = None,
    weights_access_token: str | None = None,
    optimizer_config: types.OptimizerConfig | None = None,
    with_optimizer: bool = False,
) -> TrainingClient:
    """Create a model from a checkpoint, with or without its optimizer state."""
    parse_tinker_path(path)
    await holder.session_id()
    if holder.flags.create_model_via_load_weights:
        message = types.LoadWeightsRequest(
            session_id=await holder.session_id(),
            model_seq_id=holder.next_model_seq_id(),
            base_model=base_model,
            user_metadata=user_metadata,
            path=path,
            optimizer=with_optimizer,
            optimizer_config=optimizer_config,
            weights_access_token=weights_access_token,
        )
        return await _create_by_loading(holder, message)
    info = await _weights_info(holder, path, weights_access_token)
    if not info.is_lora or info.lora_rank is None:
        raise InvalidInput(f"{path} does not contain a LoRA adapter, so it cannot be trained")
    lora = types.LoraConfig(
        rank=info.lora_rank,
        train_unembed=info.train_unembed is not False,
        train_mlp=info.train_mlp is not False,
        train_attn=info.train_attn is not False,
        alpha=info.alpha,
        use_rslora=info.use_rslora,
        target_modules=info.target_modules,
    )
    optimizer = info.optimizer_config if with_optimizer else optimizer_config
    base_model = base_model or info.base_model
    client = await create_model(holder, base_model, lora, user_metadata, optimizer)
    try:
        await client.load(path, weights_access_token, optimizer=with_optimizer)
    except BaseException:  # a cancellation too must not leave the model loaded
        holder.create_task(_unload_model(holder, client.model_id))
        raise
    return client


async def _unload_model(holder: Holder, model_id: str) -> None:
    """Unload a model whose weights could not be loaded; best effort, no retries."""
    message = types.UnloadModelRequest(model_id=model_id)
    try:
        await holder.transport.call(UNLOAD_MODEL, message, policy=NO_RETRY)
    except TinkexError as error:
        logger.debug("Model %s was not unloaded: %s", model_id, error)


async def _create_by_loading(holder: Holder, message: types.LoadWeightsRequest) -> TrainingClient:
    reply = await run_job(_training_poller(holder, message.path), LOAD_WEIGHTS, message)
    # The server derives model ids from (session, seq id); older servers do not return them.
    model_id = reply.model_id or f"{message.session_id}:train:{message.model_seq_id}"
    return TrainingClient(holder, message.model_seq_id or 0, model_id)


async def _weights_info(
    holder: Holder, path: str, weights_access_token: str | None
) -> types.WeightsInfoResponse:
    # Another tenant's checkpoint is readable only with its access token.
    headers = None
    if weights_access_token:
        headers = {"x-api-key": await holder.identity.exchange_if_needed(weights_access_token)}
    message = WeightsInfoRequest(tinker_path=path)
    return await holder.transport.call(WEIGHTS_INFO, message, headers=headers)


async def upload_loss(holder: Holder, traced: TracedLoss) -> LossHandle:
    """Upload a traced loss if the server can run it; otherwise it runs locally."""
    session_id = await holder.session_id()
    loss_id = None
    if holder.flags.custom_loss_server_side:
        message = types.CreateCustomLossRequest(
            session_id=session_id,
            custom_loss_seq_id=holder.next_custom_loss_seq_id(),
            name=traced.name,
            inputs=list(traced.inputs),
            graph=encode_graph(traced.graph),
        )
        poller = _training_poller(holder, traced.name)
        try:
            loss_id = (await run_job(poller, CREATE_CUSTOM_LOSS, message)).loss_id
        except UnprocessableEntityError as error:
            logger.info("the loss %s runs in this process: %s", traced.name, error.message)
    return LossHandle(
        name=traced.name,
        inputs=traced.inputs,
        session_id=session_id,
        graph=traced.graph,
        loss_id=loss_id,
    )


def _training_poller(holder: Holder, name: str) -> Poller:
    return holder.poller(QueueStateLogger("training", name), name)
