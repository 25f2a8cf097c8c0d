"""What `tinkex train` does with any recipe: run it, show it, and say how to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.drawing import default_model
from tinkex.cli.commands.train.meter import training_progress
from tinkex.cli.commands.train.options import RUN_OPTION_NAMES
from tinkex.cli.context import Context
from tinkex.cli.errors import INTERRUPTED
from tinkex.cli.files import check_run_directory
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.next_commands import build_command_line, suggest_commands
from tinkex.cli.output import PropertiesOutput, show
from tinkex.cli.progress import print_status, spinner
from tinkex.cli.short_ids import expand_path
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.ids import parse_tinker_path
from tinkex.recipes.interrupts import stop_on_interrupt
from tinkex.recipes.plan import Plan
from tinkex.recipes.report import RecipeResult
from tinkex.recipes.run import DEFAULT_RUNS_DIR, RunOptions
from tinkex.server.headlines import format_metric

_STOPPING_NOTICE = "Stopping after the steps that were sent; Ctrl-C again ends at once."


def run_recipe(
    context: Context, make_plan: type[Plan], recipe: ModuleType, settings: Mapping[str, Any]
) -> None:
    """Run a recipe to its end, or until it is interrupted."""
    options = RunOptions(**{name: settings[name] for name in RUN_OPTION_NAMES})
    given = {name: settings[name] for name in settings if name not in RUN_OPTION_NAMES}
    if given["start_from"] is not None:
        given["start_from"] = expand_path(
            context, given["start_from"], "weights", needs_worker=True
        )
    is_open = given["base_model"] is None and given["start_from"] is None
    # The rest is checked now; which model there is, only the server can say.
    plan = make_plan(**(given | {"base_model": DEFAULT_MODEL} if is_open else given))
    # A missing file is reported before a server is started for it.
    data = recipe.open_data(plan)
    check_run_directory(options.run_dir or DEFAULT_RUNS_DIR)
    notices: list[str] = []
    with service_client(context) as client, spinner() as wait:
        say = notices.append if context.is_json else wait.print_line
        if is_open:
            models = client.get_server_capabilities().supported_models
            usual = default_model(model for model in models if model.trainable is not False)
            plan = replace(plan, base_model=usual)
        run = recipe.run(plan, client, options, say, data)
        say(
            f"Training {plan.base_model or plan.start_from} on "
            f"{format_count(len(run.rows), 'row')}: {format_count(run.total, 'step')}, "
            f"kept in {run.journal.directory}"
        )
        with (
            stop_on_interrupt(run, lambda: say(_STOPPING_NOTICE)),
            training_progress(context, run.total) as shown,
        ):
            for report in run:
                wait.close()
                shown(report)
        assert run.result is not None  # the loop has ended
        if not run.result.is_complete:
            client.close("interrupted").result()
    _print_result(context, run.result, notices)


def _print_result(context: Context, result: RecipeResult, notices: list[str]) -> None:
    show(context, PropertiesOutput({**result.to_dict(), "notices": notices}, _result_rows(result)))
    if result.is_complete:
        suggest_commands(context, next_commands(context, result))
        return
    if not context.is_json:
        print_status(
            f"Stopped after step {result.step} of {result.total}; the same command goes on there."
        )
    click.get_current_context().exit(INTERRUPTED)


def next_commands(context: Context, result: RecipeResult) -> list[list[str]]:
    """What can be done with the checkpoints of a complete run."""
    assert result.sampler_path is not None  # the run is complete
    run_id = parse_tinker_path(result.sampler_path).run_id
    return [
        build_command_line(context, "chat", result.sampler_path),
        build_command_line(
            context, "sample", "--model-path", result.sampler_path, "--prompt", "Hello"
        ),
        build_command_line(context, "run", "plot", run_id),
        build_command_line(
            context, "checkpoint", "download", result.state_path or result.sampler_path
        ),
    ]


def _result_rows(result: RecipeResult) -> list[tuple[str, str]]:
    rows = [
        ("Steps", f"{result.step} of {result.total}"),
        ("Loss", format_metric(result.loss)),
        *((name, format_metric(value)) for name, value in result.metrics.items()),
        ("Training State", result.state_path or "-"),
        ("Sampler Weights", result.sampler_path or "-"),
        ("Run Directory", str(result.run_dir)),
    ]
    for sample in result.samples:
        rows += [("Prompt", escape_line(sample.prompt)), ("Answer", escape_line(sample.text))]
    return rows
