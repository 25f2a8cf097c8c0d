"""The interface of a training method, its context, and the order of the data."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Generic, NamedTuple, TypeVar

from tinkex.client.config import Config
from tinkex.client.custom_loss import CustomLossFnV1
from tinkex.client.future import APIFuture
from tinkex.client.sampling import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.client.training import TrainingClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import RenderedExample, Renderer
from tinkex.display import format_count
from tinkex.errors import InvalidInput, NotFoundError
from tinkex.recipes.plan import Plan
from tinkex.recipes.regularized import add_reference, find_reference_inputs
from tinkex.recipes.run_directory import SavedProgress
from tinkex.regularizers import with_regularizers
from tinkex.settings import HOSTED_BASE_URL
from tinkex.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse


def create_training_client(
    service: ServiceClient, plan: Plan, saved: SavedProgress | None
) -> TrainingClient:
    """Create a training client from a saved state, a checkpoint or a base model."""
    metadata = {"recipe": plan.kind, "name": plan.label}
    if saved is not None:
        try:
            return service.create_training_client_from_state_with_optimizer(
                saved.state_path, user_metadata=metadata
            ).result()
        except NotFoundError as error:
            raise InvalidInput(
                f"the saved state {saved.state_path} is no longer on the server",
                hint="Start over with --restart.",
            ) from error
    if plan.start_from is not None:
        return service.create_training_client_from_state(
            plan.start_from, base_model=plan.base_model, user_metadata=metadata
        ).result()
    assert plan.base_model is not None  # checked by the plan
    return service.create_lora_training_client(
        plan.base_model,
        rank=plan.rank,
        seed=plan.seed,
        user_metadata=metadata,
        **plan.lora_options(),
    ).result()


def find_max_tokens(
    service: ServiceClient, training: TrainingClient, plan: Plan, tell: Callable[[str], None]
) -> int | None:
    """Return the maximum example length: that of the plan, at most the model's context."""
    limit = _max_context_length(
        service, training.get_info().result().model_data.model_name or plan.base_model
    )
    if limit is not None and (plan.kind == "dpo" or plan.needs_reference):
        # Reference log-probabilities are computed by sampling one token after the text.
        limit -= 1
    if limit is None or plan.max_tokens is None:
        return plan.max_tokens or limit
    if plan.max_tokens > limit:
        tell(f"The model's context is {limit} tokens, so examples are truncated to {limit}")
    return min(plan.max_tokens, limit)


def _max_context_length(service: ServiceClient, model_name: str | None) -> int | None:
    for model in service.get_server_capabilities().result().supported_models:
        if model.model_name == model_name:
            return model.max_context_length
    return None


def server_identity(config: Config) -> str:
    """Return a stable name of the server; the port of a local server may change."""
    is_local = config.local_home is not None and config.base_url != HOSTED_BASE_URL
    return f"local {config.local_home}" if is_local else config.base_url


PlanT = TypeVar("PlanT", bound=Plan)
RowT = TypeVar("RowT")
#: Shows a message to the user.
NoticeFn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step that was sent to the server."""

    epoch: int
    num_tokens: int = 0
    output_future: APIFuture[ForwardBackwardOutput] | None = None
    optim_future: APIFuture[OptimStepResponse] | None = None
    loss: float | None = None
    """The mean loss if it is computed locally; otherwise the server computes it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    compute_metrics: Callable[[ForwardBackwardOutput], Mapping[str, float]] | None = None
    """Computes further metrics from the result."""

    def wait(self) -> tuple[float | None, Mapping[str, float]]:
        """Wait for the step; returns its loss and metrics."""
        output = None if self.output_future is None else self.output_future.result()
        if self.optim_future is not None:
            self.optim_future.result()
        if output is None:
            return self.loss, self.metrics
        loss = output.metrics.get("loss:sum") if self.loss is None else self.loss
        more = self.compute_metrics(output) if self.compute_metrics is not None else {}
        return loss, {**self.metrics, **more}


@dataclass(slots=True)
class NoticeLog:
    """Shows the first notice of each kind, and counts the rest."""

    tell: NoticeFn
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sentence: str) -> None:
        """Count a notice; it is shown if it is the first of its kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] == 1:
            self.tell(sentence)

    def log_totals(self) -> None:
        """Show the count of each kind that occurred more than once."""
        for kind, count in self.counts.items():
            if count > 1:
                self.tell(f"{kind}: {format_count(count, 'time')} in total")


@dataclass(frozen=True, slots=True)
class RecipeContext(Generic[PlanT]):
    """Everything a method needs."""

    plan: PlanT
    service: ServiceClient
    training: TrainingClient
    renderer: Renderer
    notices: NoticeLog
    num_steps: int

    def has_targets(self, place: str, *examples: RenderedExample) -> bool:
        """Return True if every example has targets; shows notices about truncation."""
        for example in examples:
            if example.num_truncated:
                length = len(example.tokens) + example.num_truncated
                self.notices.add(
                    "truncated rows",
                    f"{place} has {format_count(length, 'token')} and was truncated to "
                    f"{len(example.tokens)}",
                )
        if all(example.num_learned for example in examples):
            return True
        self.notices.add("skipped rows", f"{place} is skipped: it has no targets after truncation")
        return False


class RecipeMethod(ABC, Generic[PlanT, RowT]):
    """A training method on one data file."""

    #: True if loss and metrics are computed locally and must be reported to the server.
    computes_metrics_locally: ClassVar[bool] = True

    def __init__(
        self,
        context: RecipeContext[PlanT],
        rows: JsonlFile[RowT],
        reference_path: str | None = None,
    ) -> None:
        self.context = context
        self.rows = rows
        self.reference_path = reference_path
        """Path of the reference weights, for methods that need them."""
        self._reference: SamplingClient | None = None
        if context.plan.needs_reference:
            # Now, before the first step changes the weights.
            self.open_reference()

    @abstractmethod
    def submit(self, step: int, adam: AdamParams) -> SubmittedStep:
        """Send the requests of a step counted from 0."""

    @abstractmethod
    def evaluate(self, rows: JsonlFile[RowT]) -> dict[str, float]:
        """Compute metrics with the weights after the last submitted step."""

    def open_reference(self) -> SamplingClient:
        """Return a client of the initial weights; they are saved once if they are not the base."""
        if self._reference is None:
            plan = self.context.plan
            if self.reference_path is None and plan.start_from is not None:
                name = f"{plan.label}-reference"
                saved = self.context.training.save_weights_for_sampler(name)
                self.reference_path = saved.result().path
            # A new adapter has no effect, so the base model is the reference.
            self._reference = self.context.service.create_sampling_client(
                model_path=self.reference_path,
                base_model=None if self.reference_path else plan.base_model,
            ).result()
        return self._reference

    def submit_regularized(
        self, data: list[Datum], base_loss: CustomLossFnV1
    ) -> APIFuture[ForwardBackwardOutput]:
        """Submit a batch with the regularizers of the plan added to a loss."""
        terms = self.context.plan.regularizers
        if names := find_reference_inputs(terms):
            data = add_reference(data, self.open_reference(), names)
        loss_fn = with_regularizers(base_loss, terms)
        return self.context.training.forward_backward_custom(data, loss_fn)

    def drain(self) -> None:
        """Wait for prefetched requests; called once, after the last step."""

    def batch(self, step: int) -> RowBatch:
        """Return the rows of a step."""
        plan = self.context.plan
        return batch_at(step, len(self.rows), plan.batch_size, plan.seed)


class RowBatch(NamedTuple):
    """The rows of one step."""

    epoch: int
    """Counted from 0."""
    rows: Sequence[int]


def count_steps(num_rows: int, batch_size: int, epochs: int, steps: int | None) -> int:
    """Return the number of steps of a run; `steps` takes precedence over `epochs`."""
    return steps if steps is not None else epochs * steps_per_epoch(num_rows, batch_size)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the number of batches per epoch; the last one may be smaller."""
    return math.ceil(num_rows / batch_size)


def batch_at(step: int, num_rows: int, batch_size: int, seed: int) -> RowBatch:
    """Return the rows of a step counted from 0; seed and epoch determine the shuffle."""
    epoch, index = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = _epoch_order(num_rows, seed, epoch)
    return RowBatch(epoch, order[index * batch_size : (index + 1) * batch_size])


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def derive_seed(seed: int, *parts: object) -> int:
    """Derive a seed from the run's seed and any number of parts."""
    return random.Random("/".join(map(str, (seed, *parts)))).getrandbits(31)


def iter_batches(num_rows: int, batch_size: int) -> Iterator[Sequence[int]]:
    """Yield all row numbers in batches, in order."""
    for start in range(0, num_rows, batch_size):
        yield range(start, min(num_rows, start + batch_size))
