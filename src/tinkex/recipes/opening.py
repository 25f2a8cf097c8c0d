"""How a run gets its training client, and what it finds out about the server."""

from __future__ import annotations

from collections.abc import Callable

from tinkex.client.config import Config
from tinkex.client.service import ServiceClient
from tinkex.client.training import TrainingClient
from tinkex.errors import InvalidInput, NotFoundError
from tinkex.recipes.journal import SavedProgress
from tinkex.recipes.plan import Plan
from tinkex.settings import HOSTED_BASE_URL


def create_training_client(
    service: ServiceClient, plan: Plan, saved: SavedProgress | None
) -> TrainingClient:
    """A client that goes on from a saved state, or begins as the plan says."""
    about = {"recipe": plan.kind, "name": plan.label}
    if saved is not None:
        try:
            return service.create_training_client_from_state_with_optimizer(
                saved.state_path, user_metadata=about
            )
        except NotFoundError as error:
            raise InvalidInput(
                f"the saved state {saved.state_path} is no longer on the server",
                hint="Start over with --restart.",
            ) from error
    if plan.start_from is not None:
        return service.create_training_client_from_state(
            plan.start_from, base_model=plan.base_model, user_metadata=about
        )
    assert plan.base_model is not None  # the plan made sure of it
    return service.create_lora_training_client(
        plan.base_model, rank=plan.rank, seed=plan.seed, user_metadata=about
    )


def find_max_tokens(
    service: ServiceClient, training: TrainingClient, plan: Plan, tell: Callable[[str], None]
) -> int | None:
    """The longest example: what the plan says, and no more than the model reads."""
    limit = _max_context_length(
        service, training.get_info().model_data.model_name or plan.base_model
    )
    if limit is not None and plan.kind == "dpo":
        # The starting weights are asked what they think of a text by sampling one token after it.
        limit -= 1
    if limit is None or plan.max_tokens is None:
        return plan.max_tokens or limit
    if plan.max_tokens > limit:
        tell(f"The model reads at most {limit} tokens, so examples are cut to {limit}")
    return min(plan.max_tokens, limit)


def _max_context_length(service: ServiceClient, model_name: str | None) -> int | None:
    for model in service.get_server_capabilities().supported_models:
        if model.model_name == model_name:
            return model.max_context_length
    return None


def server_identity(config: Config) -> str:
    """What names the server for good: the port of this machine's own may change."""
    is_local = config.local_home is not None and config.base_url != HOSTED_BASE_URL
    return f"local {config.local_home}" if is_local else config.base_url
