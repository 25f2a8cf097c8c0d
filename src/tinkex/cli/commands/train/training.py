"""What `tinkex train` does with any recipe: run it, show it, and say how to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import click

from tinkex.cli.client import service
from tinkex.cli.commands.drawing import usual_of
from tinkex.cli.commands.train.meter import meter
from tinkex.cli.commands.train.options import RUN_OPTIONS
from tinkex.cli.context import Context
from tinkex.cli.errors import INTERRUPTED
from tinkex.cli.files import check_directory
from tinkex.cli.format import format_count, plain_line
from tinkex.cli.next_commands import suggest, with_server
from tinkex.cli.output import Facts, show
from tinkex.cli.progress import tell, waiting
from tinkex.cli.short_ids import full_path
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.ids import parse_tinker_path
from tinkex.recipes.interrupts import stop_on_interrupt
from tinkex.recipes.plan import Plan
from tinkex.recipes.report import RecipeResult
from tinkex.recipes.run import DEFAULT_RUNS_DIR, RunOptions
from tinkex.server.headlines import format_metric

_STOPPING = "Stopping after the steps that were sent; Ctrl-C again ends at once."


def train(
    context: Context, make_plan: type[Plan], recipe: ModuleType, settings: Mapping[str, Any]
) -> None:
    """Run a recipe to its end, or until it is interrupted."""
    options = RunOptions(**{name: settings[name] for name in RUN_OPTIONS})
    given = {name: settings[name] for name in settings if name not in RUN_OPTIONS}
    if given["start_from"] is not None:
        given["start_from"] = full_path(context, given["start_from"], "weights", needs_worker=True)
    is_open = given["base_model"] is None and given["start_from"] is None
    # The rest is checked now; which model there is, only the server can say.
    plan = make_plan(**(given | {"base_model": DEFAULT_MODEL} if is_open else given))
    # A missing file is reported before a server is started for it.
    data = recipe.open_data(plan)
    check_directory(options.run_dir or DEFAULT_RUNS_DIR)
    notices: list[str] = []
    with service(context) as client, waiting() as wait:
        say = notices.append if context.is_json else wait.tell
        if is_open:
            models = client.get_server_capabilities().supported_models
            usual = usual_of(model for model in models if model.trainable is not False)
            plan = replace(plan, base_model=usual)
        run = recipe.run(plan, client, options, say, data)
        say(
            f"Training {plan.base_model or plan.start_from} on "
            f"{format_count(len(run.rows), 'row')}: {format_count(run.total, 'step')}, "
            f"kept in {run.journal.directory}"
        )
        with stop_on_interrupt(run, lambda: say(_STOPPING)), meter(context, run.total) as shown:
            for report in run:
                wait.close()
                shown(report)
        assert run.result is not None  # the loop has ended
        if not run.result.is_complete:
            client.close("interrupted").result()
    _end(context, run.result, notices)


def _end(context: Context, result: RecipeResult, notices: list[str]) -> None:
    show(context, Facts({**result.to_dict(), "notices": notices}, _facts(result)))
    if result.is_complete:
        suggest(context, next_commands(context, result))
        return
    if not context.is_json:
        tell(f"Stopped after step {result.step} of {result.total}; the same command goes on there.")
    click.get_current_context().exit(INTERRUPTED)


def next_commands(context: Context, result: RecipeResult) -> list[list[str]]:
    """What can be done with the checkpoints of a complete run."""
    assert result.sampler_path is not None  # the run is complete
    run_id = parse_tinker_path(result.sampler_path).run_id
    return [
        with_server(context, "chat", result.sampler_path),
        with_server(context, "sample", "--model-path", result.sampler_path, "--prompt", "Hello"),
        with_server(context, "run", "plot", run_id),
        with_server(context, "checkpoint", "download", result.state_path or result.sampler_path),
    ]


def _facts(result: RecipeResult) -> list[tuple[str, str]]:
    rows = [
        ("Steps", f"{result.step} of {result.total}"),
        ("Loss", format_metric(result.loss)),
        *((name, format_metric(value)) for name, value in result.metrics.items()),
        ("Training State", result.state_path or "-"),
        ("Sampler Weights", result.sampler_path or "-"),
        ("Run Directory", str(result.run_dir)),
    ]
    for sample in result.samples:
        rows += [("Prompt", plain_line(sample.prompt)), ("Answer", plain_line(sample.text))]
    return rows
