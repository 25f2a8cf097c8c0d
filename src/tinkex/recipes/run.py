"""The training loop of all recipes: pipelined steps, checkpoints and resume."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from tinkex.client.future import APIFuture
from tinkex.client.service import ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import Renderer
from tinkex.data.rows import RecipeRow
from tinkex.display import select_headlines
from tinkex.errors import InvalidInput
from tinkex.logs import get_logger
from tinkex.recipes.checkpoint_limit import choose_surplus, delete_checkpoints
from tinkex.recipes.method import (
    NoticeFn,
    NoticeLog,
    RecipeContext,
    RecipeMethod,
    SubmittedStep,
    count_steps,
    create_training_client,
    find_max_tokens,
    server_identity,
)
from tinkex.recipes.plan import Plan, settings_digest
from tinkex.recipes.report import (
    MetricsReporter,
    RecipeResult,
    SampledAnswer,
    StepReport,
    Throughput,
    choose_prompts,
    generate_samples,
)
from tinkex.recipes.run_directory import RunDirectory, SavedProgress
from tinkex.schedules import learning_rate, warmup_steps
from tinkex.types import AdamParams, SaveWeightsResponse

PlanT = TypeVar("PlanT", bound=Plan)
RowT = TypeVar("RowT", bound=RecipeRow)
MakeMethod = Callable[
    [RecipeContext[PlanT], JsonlFile[RowT], str | None], RecipeMethod[PlanT, RowT]
]

logger = get_logger(__name__)
#: Steps in flight before the loop waits for the oldest.
MAX_STEPS_IN_FLIGHT = 2
DEFAULT_RUNS_DIR = Path("runs")


def log_notice(sentence: str) -> None:
    """Write a notice to the log."""
    logger.info("%s", sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a run is stored, and how it treats an existing one."""

    run_dir: Path | None = None
    """Run directory; default: below `runs`, named by settings and data."""
    restart: bool = False
    """Discard any existing run and start over."""
    accept_changes: bool = False
    """Resume even if settings or data have changed."""


class RecipeData(Generic[RowT]):
    """The data files of a plan, parsed and checked without a server."""

    def __init__(self, plan: Plan, parse: Callable[[object], RowT]) -> None:
        self.rows = JsonlFile(plan.data, parse)
        self.eval_rows = None if plan.eval_data is None else JsonlFile(plan.eval_data, parse)


class _PendingStep(NamedTuple):
    """A submitted step, counted from 0, and the checkpoint after it."""

    step: int
    rate: float
    submitted: SubmittedStep
    eval_metrics: Mapping[str, float]
    save_future: APIFuture[SaveWeightsResponse] | None


class Run(Generic[PlanT, RowT]):
    """A fine-tuning run: iterate over it for a report per step, then read `result`.

    Progress is stored in the run directory, so that the same run resumes after an interruption.
    """

    def __init__(
        self,
        plan: PlanT,
        service: ServiceClient,
        make_method: MakeMethod[PlanT, RowT],
        data: RecipeData[RowT],
        *,
        options: RunOptions | None = None,
        tell: NoticeFn = log_notice,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.rows = data.rows
        self.total = count_steps(len(self.rows), plan.batch_size, plan.epochs, plan.steps)
        self.result: RecipeResult | None = None
        self._eval_rows = data.eval_rows
        self._options = options or RunOptions()
        self._service, self._make_method, self._tell = service, make_method, tell
        self._settings = {
            **plan.training_settings(),
            **(inputs or {}),
            "data_digest": self.rows.digest,
            "server": server_identity(service.config),
        }
        default = DEFAULT_RUNS_DIR / f"{plan.label}-{settings_digest(self._settings)}"
        self.run_directory = RunDirectory(self._options.run_dir or default)
        self._is_stopping = False
        self._throughput = Throughput(0.0)
        self._num_done = 0
        self._saved: SavedProgress | None = None
        self._loss: float | None = None
        self._last_metrics: Mapping[str, float] = {}
        self._reporter = MetricsReporter(service)

    def stop(self) -> None:
        """Stop after the submitted steps and save; safe in a signal handler."""
        self._is_stopping = True

    def __iter__(self) -> Iterator[StepReport]:
        with self.run_directory.lock():
            self._saved = self._load_progress()
            if self._saved is not None and self._saved.result is not None:
                self.result = _read_result(self._saved.result)
                self._tell(f"This run is complete; its directory is {self.run_directory.directory}")
                return
            method = self._create_method()
            yield from self._train(method)
            self.result = self._finish(method)

    def _load_progress(self) -> SavedProgress | None:
        if self._options.restart:
            self.run_directory.clear_progress()
        if changes := self.run_directory.find_changes(self._settings):
            self._check_changes("; ".join(changes))
        plan = {**self.plan.to_dict(), "total_steps": self.total}
        self.run_directory.write_plan(plan, self._settings)
        saved = self.run_directory.read_progress()
        if saved is not None and saved.step < self.total and saved.result is not None:
            # The number of steps was raised, so the run is not complete.
            saved = msgspec.structs.replace(saved, result=None)
        return saved

    def _check_changes(self, changes: str) -> None:
        if self._options.accept_changes:
            self._tell(f"Resuming with changed settings: {changes}")
            return
        raise InvalidInput(
            f"the settings of the run in {self.run_directory.directory} have changed: {changes}",
            hint="Undo the change, start over with --restart, or resume with --accept-changes.",
        )

    def _create_method(self) -> RecipeMethod[PlanT, RowT]:
        saved = self._saved
        self._num_done = 0 if saved is None else saved.step
        self.run_directory.truncate_metrics(self._num_done)
        losses = [
            loss
            for row in self.run_directory.read_metrics()
            if isinstance(loss := row.get("loss"), int | float)
        ]
        self._loss = losses[-1] if losses else None
        if saved is None:
            self._tell(
                f"Creating the adapter on {self.plan.start_from or self.plan.base_model} ..."
            )
        else:
            self._tell(f"Resuming after step {saved.step} of {self.total} from {saved.state_path}")
        training = create_training_client(self._service, self.plan, saved)
        self._tell("Loading the tokenizer ...")
        limit = find_max_tokens(self._service, training, self.plan, self._tell)
        renderer = Renderer(training.get_tokenizer(), limit)
        context = RecipeContext(
            self.plan, self._service, training, renderer, NoticeLog(self._tell), self.total
        )
        return self._make_method(context, self.rows, saved.reference_path if saved else None)

    # --- steps ------------------------------------------------------------------------------

    def _train(self, method: RecipeMethod[PlanT, RowT]) -> Iterator[StepReport]:
        self._throughput = Throughput(time.monotonic())
        pending: deque[_PendingStep] = deque()
        for step in range(self._num_done, self.total):
            if self._is_stopping:
                break
            pending.append(self._send(method, step))
            if len(pending) == MAX_STEPS_IN_FLIGHT:
                yield self._collect(method, pending.popleft())
        while pending:
            yield self._collect(method, pending.popleft())
        method.drain()
        self._reporter.drain()

    def _send(self, method: RecipeMethod[PlanT, RowT], step: int) -> _PendingStep:
        plan = self.plan
        rate = learning_rate(
            step,
            peak=plan.learning_rate,
            warmup=warmup_steps(plan.warmup, self.total),
            total=self.total,
            kind=plan.schedule,
        )
        adam = AdamParams(
            learning_rate=rate, grad_clip_norm=plan.grad_clip_norm, weight_decay=plan.weight_decay
        )
        submitted = method.submit(step, adam)
        # The server executes requests in order, so the save needs no waiting.
        is_due = self._is_due(step + 1, plan.save_every)
        saving = self._save(method, step + 1) if is_due else None
        eval_metrics: Mapping[str, float] = {}
        if self._eval_rows is not None and self._is_due(step + 1, plan.eval_every):
            eval_metrics = method.evaluate(self._eval_rows)
        return _PendingStep(step, rate, submitted, eval_metrics, saving)

    def _is_due(self, done: int, every: int) -> bool:
        return done == self.total or (every > 0 and done % every == 0)

    def _save(self, method: RecipeMethod[PlanT, RowT], done: int) -> APIFuture[SaveWeightsResponse]:
        name = f"{self.plan.label}-{done:06d}"
        return method.context.training.save_state(name, overwrite=True)

    def _collect(self, method: RecipeMethod[PlanT, RowT], sent: _PendingStep) -> StepReport:
        loss, metrics = sent.submitted.wait()
        num_tokens = sent.submitted.num_tokens
        report = StepReport(
            step=sent.step + 1,
            total=self.total,
            epoch=sent.submitted.epoch + 1,
            loss=loss,
            learning_rate=sent.rate,
            num_tokens=num_tokens,
            tokens_per_second=self._throughput.update(time.monotonic(), num_tokens),
            metrics={**metrics, **sent.eval_metrics},
        )
        self._report(method, sent, report)
        self._num_done, self._loss = report.step, loss if loss is not None else self._loss
        self._last_metrics = {**self._last_metrics, **select_headlines(report.metrics)}
        self.run_directory.append_metrics(report.to_dict())
        if sent.save_future is not None:
            self._save_progress(method, sent.save_future)
        return report

    def _report(
        self, method: RecipeMethod[PlanT, RowT], sent: _PendingStep, report: StepReport
    ) -> None:
        """Report metrics to the server that it cannot compute itself."""
        optim_future = sent.submitted.optim_future
        metrics = (
            {"loss": report.loss, **report.metrics}
            if method.computes_metrics_locally
            else sent.eval_metrics
        )
        reported = {name: value for name, value in metrics.items() if value is not None}
        if optim_future is not None and optim_future.seq_id is not None and reported:
            self._reporter.report(method.context.training.model_id, optim_future.seq_id, reported)

    def _save_progress(
        self, method: RecipeMethod[PlanT, RowT], saving: APIFuture[SaveWeightsResponse]
    ) -> None:
        path = saving.result().path
        before = () if self._saved is None else self._saved.checkpoints
        self._saved = SavedProgress(
            step=self._num_done,
            state_path=path,
            reference_path=method.reference_path,
            checkpoints=(*(each for each in before if each != path), path),
        )
        self.run_directory.write_progress(self._saved)
        # Only now that the new one is recorded, so that a resumed run always finds its state.
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        assert self._saved is not None
        num_kept = self.plan.keep_checkpoints
        surplus = choose_surplus(self._saved.checkpoints, num_kept)
        if not surplus:
            return
        done = delete_checkpoints(self._service, surplus, self._tell)
        kept = tuple(path for path in self._saved.checkpoints if path not in done)
        self._saved = msgspec.structs.replace(self._saved, checkpoints=kept)
        self.run_directory.write_progress(self._saved)

    # --- the end ----------------------------------------------------------------------------

    def _finish(self, method: RecipeMethod[PlanT, RowT]) -> RecipeResult:
        if self._num_done and (self._saved is None or self._saved.step != self._num_done):
            self._save_progress(method, self._save(method, self._num_done))
        method.context.notices.log_totals()
        if self._num_done < self.total:
            return self._result()
        name = f"{self.plan.label}-final"
        saved = method.context.training.save_weights_for_sampler(name).result()
        # Record completion before sampling, which may fail.
        self._complete(self._result(saved.path))
        sampler = method.context.training.create_sampling_client(saved.path).result()
        prompts = choose_prompts(self.plan.samples, self.rows.read_rows([0])[0])
        samples = generate_samples(
            sampler, method.context.renderer, prompts, self.plan, tell=self._tell
        )
        result = self._result(saved.path, samples)
        self._complete(result)
        return result

    def _complete(self, result: RecipeResult) -> None:
        assert self._saved is not None  # the last step is always saved
        saved = msgspec.structs.replace(self._saved, result=result.to_dict())
        self.run_directory.write_progress(saved)

    def _result(
        self, sampler_path: str | None = None, samples: tuple[SampledAnswer, ...] = ()
    ) -> RecipeResult:
        return RecipeResult(
            is_complete=sampler_path is not None,
            step=self._num_done,
            total=self.total,
            run_dir=self.run_directory.directory,
            state_path=None if self._saved is None else self._saved.state_path,
            sampler_path=sampler_path,
            loss=self._loss,
            metrics=self._last_metrics,
            samples=samples,
        )


def _read_result(written: Mapping[str, Any]) -> RecipeResult:
    try:
        samples = tuple(SampledAnswer(**sample) for sample in written["samples"])
        fields = {**written, "run_dir": Path(written["run_dir"]), "samples": samples}
        return RecipeResult(**fields)
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f"the result in progress.json cannot be read: {error}",
            hint="Start over with --restart.",
        ) from error
