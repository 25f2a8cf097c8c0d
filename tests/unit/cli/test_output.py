"""Output at 40, 80 and 200 columns and as JSON; ids and paths are never truncated."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.client import Listing
from tinkex.cli.context import Context, Screen
from tinkex.cli.format import fit_columns, min_column_width, table_width
from tinkex.cli.output import Column, Output, PropertiesOutput, TableOutput, announce, show
from tinkex.cli.output.base import to_json, to_jsonable
from tinkex.cli.output.checkpoints import CheckpointInfo, CheckpointList
from tinkex.cli.output.runs import RunInfo, RunList
from tinkex.types import Checkpoint, TrainingRun

RUN_ID = "82810c9f-dd83-49e2-8069-20d10792b196:train:2"
PATH = f"tinker://{RUN_ID}/sampler_weights/0001-x"
MADE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def saved(**changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "checkpoint_id": "sampler_weights/0001-x",
        "checkpoint_type": "sampler",
        "time": MADE,
        "tinker_path": PATH,
        "size_bytes": 1048576,
    }
    return Checkpoint(**fields | changes)


def make_run(**changes: Any) -> TrainingRun:
    fields: dict[str, Any] = {
        "training_run_id": RUN_ID,
        "base_model": "meta-llama/Llama-3.1-8B-Instruct",
        "model_owner": "tml:user:586ea7a9",
        "is_lora": True,
        "lora_rank": 32,
        "last_request_time": MADE,
        "last_checkpoint": saved(),
        "user_metadata": {"team": "red"},
    }
    return TrainingRun(**fields | changes)


RUNS = RunList(Listing([make_run(), make_run(lora_rank=None, corrupted=True)], 7))
CHECKPOINTS = CheckpointList(Listing([saved(), saved(public=True)], 2))
ALL: list[Output] = [RUNS, CHECKPOINTS, RunInfo(make_run()), CheckpointInfo(saved(), make_run())]


def print_output(capsys: pytest.CaptureFixture[str], result: Output, **screen: Any) -> str:
    result.print("table", Screen(**screen))
    return capsys.readouterr().out


def joined(text: str) -> str:
    """Return every cell of a table with its wrapped lines joined."""
    cells: dict[int, str] = {}
    for line in text.splitlines():
        for place, cell in enumerate(re.split("[│┃]", line)):
            cells[place] = cells.get(place, "") + cell.strip()
    return " ".join(cells.values())


@pytest.mark.parametrize("width", [40, 80, 200, None])
@pytest.mark.parametrize("result", ALL, ids=lambda result: type(result).__name__)
def test_ids_and_paths_are_complete_at_every_width(
    result: Output, width: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = print_output(capsys, result, width=width)
    whole = joined(shown)
    for text in {cell for row in result.rows() for cell in row if cell in {RUN_ID, PATH}}:
        assert text in whole
    assert "…" not in shown
    is_table = "┃" in shown
    if width is not None and is_table:
        table = shown.splitlines()[1:]
        assert max(map(len, table)) <= width


def test_a_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = print_output(capsys, RUNS, width=200).splitlines()
    assert lines[0] == "2 training runs (5 more not shown, use --limit to see more)"
    assert re.findall(r"[A-Z][\w ]+\w", lines[2]) == [
        "Run ID",
        "Base Model",
        "LoRA",
        "Last Update",
        "Status",
    ]
    assert lines[4].split() == [
        *("│", RUN_ID, "│", "meta-llama/Llama-3.1-8B-Instruct", "│", "Rank", "32"),
        *("│", "2026-01-02", "│", "OK", "│"),
    ]
    assert lines[5].split()[5:] == ["Yes", "│", "2026-01-02", "│", "Failed", "│"]


def test_high_rank_columns_are_dropped_first(capsys: pytest.CaptureFixture[str]) -> None:
    wide, narrow = (print_output(capsys, CHECKPOINTS, width=width) for width in (200, 80))
    for heading in ("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"):
        assert heading in wide
    assert "Public" not in narrow
    assert {"Type", "Size", "Created", "Path"} <= set(re.findall(r"[A-Z]\w+(?: ID)?", narrow))


@pytest.mark.parametrize(("width", "shown"), [(80, "a sweep over learni…"), (120, "a sweep over")])
def test_run_list_truncates_long_names(
    width: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a sweep over learning rates with a very long name, seed 17"
    known = {"state": "finished", "step": 12_000, "metrics": {"loss": 1.25, "reward": 0.5}}
    runs = RunList(Listing([make_run(name=name, **known), make_run(name=None, **known)], 2))
    table = print_output(capsys, runs, width=width, is_terminal=True)
    assert "Name" in table
    assert "Status" in table
    assert shown in table
    assert max(map(len, table.splitlines())) <= width
    # Nothing is truncated in a pipe.
    assert name in print_output(capsys, runs)


@pytest.mark.parametrize(
    ("width", "name"), [(40, None), (45, "a sweep…"), (59, "a sweep over learni…")]
)
def test_run_list_drops_name_before_status(
    width: int, name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(name="a sweep over learning rates", state="interrupted", step=7)
    table = print_output(capsys, RunList(Listing([run], 1)), width=width, is_terminal=True)
    assert "82810c9f:train:2" in table
    assert "Interrupted" in table
    assert ("Name" in table) == (name is not None)
    assert (name or "") in table
    assert max(map(len, table.splitlines())) <= width


def test_run_name_is_not_repeated_in_metadata(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {"name": "squad", "state": "training", "metrics": {"loss": 1.25}}
    shown = print_output(
        capsys, RunInfo(make_run(user_metadata={"name": "squad", "team": "red"}, **named))
    )
    assert "- team" in shown
    assert shown.count("squad") == 1
    assert "Loss" in shown
    alone = print_output(capsys, RunInfo(make_run(user_metadata={"name": "squad"}, **named)))
    assert "Metadata" not in alone


def test_narrow_screen_gets_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = print_output(capsys, CHECKPOINTS, width=40).splitlines()
    assert lines[:8] == [
        "2 checkpoints",
        "sampler_weights/0001-x",
        "  Type: sampler",
        "  Size: 1.0 MB",
        "  Public: No",
        "  Created: 2026-01-02",
        "  Expires: Never",
        f"  Path: {PATH}",
    ]


def test_chosen_columns_are_never_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = RunList(Listing([make_run()], 1), ("status", "owner", "id"))
    for width in (40, 80, 200):
        shown = print_output(capsys, chosen, width=width)
        assert shown.startswith("1 training run\n")
        for text in ("OK", "tml:user:586ea7a9"):
            assert text in shown


def test_properties_are_lines_on_narrow_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"\nRun ID: {RUN_ID}\n" in print_output(capsys, RunInfo(make_run()), width=40)
    assert f"  - Path: {PATH}\n" in print_output(capsys, RunInfo(make_run()), width=40)
    assert "│ Metadata " in print_output(capsys, RunInfo(make_run()), width=80)


def test_empty_checkpoint_list_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    empty = CheckpointList(Listing([], 0), RUN_ID)
    assert print_output(capsys, empty) == f"No checkpoints found for run {RUN_ID}\n"
    empty.print("json")
    assert json.loads(capsys.readouterr().out) == {
        "run_id": RUN_ID,
        "checkpoints": [],
        "total": 0,
        "shown": 0,
    }


@pytest.mark.parametrize("result", ALL, ids=lambda result: type(result).__name__)
def test_colors_only_on_color_terminals(result: Output, capsys: pytest.CaptureFixture[str]) -> None:
    for screen in ({}, {"is_terminal": True, "width": 80}):
        assert "\x1b" not in print_output(capsys, result, **screen)
    assert "\x1b[1m" in print_output(capsys, result, is_terminal=True, is_colored=True, width=200)


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    nasty = make_run(user_metadata={"x": "\x1b[2J[red]:boom:\nnext"})
    shown = print_output(capsys, RunInfo(nasty), width=200)
    assert "\x1b" not in shown
    assert "\\x1b[2J[red]:boom: next" in shown


# --- JSON -------------------------------------------------------------------------------------


def test_json_is_indented_and_has_iso_times(capsys: pytest.CaptureFixture[str]) -> None:
    RUNS.print("json")
    text = capsys.readouterr().out
    assert text.startswith('{\n  "runs": [\n    {\n')
    found = json.loads(text)
    assert (found["total"], found["shown"]) == (7, 2)
    assert found["runs"][0]["last_request_time"] == "2026-01-02T03:04:05+00:00"
    assert found["runs"][0]["last_checkpoint"]["tinker_path"] == PATH


def test_checkpoint_info_includes_run_fields(capsys: pytest.CaptureFixture[str]) -> None:
    CheckpointInfo(saved(expires_at=MADE + timedelta(days=1)), make_run()).print("json")
    found = json.loads(capsys.readouterr().out)
    assert (found["is_lora"], found["lora_rank"]) == (True, 32)
    assert found["expires_at"] == "2026-01-03T03:04:05+00:00"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (True, True),
        (datetime(2026, 1, 2), "2026-01-02T00:00:00+00:00"),
        (MADE.date(), "2026-01-02"),
        (Path("a/b"), "a/b"),
        ((1, [2.5, {"x": None}]), [1, [2.5, {"x": None}]]),
        ({1: Column("x")}, {"1": ["x", 0, False]}),
    ],
)
def test_to_jsonable_supports_all_types(value: Any, plain: Any) -> None:
    assert to_jsonable(value) == plain


def test_to_jsonable_rejects_unknown_types() -> None:
    with pytest.raises(TypeError, match="object"):
        to_jsonable(object())


@given(st.recursive(st.none() | st.text() | st.floats(), lambda x: st.lists(x)))
def test_json_is_always_valid(value: Any) -> None:
    for is_ascii in (True, False):
        text = to_json(value, is_ascii=is_ascii)
        json.loads(text, parse_constant=lambda name: pytest.fail(name))


# --- plain results ----------------------------------------------------------------------------


def test_table_and_properties_from_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": Column("ID"), "note": Column("Note")}
    show(Context(), TableOutput([{"id": 1, "note": None, "more": 2}], columns))
    assert "│ 1  │      │" in capsys.readouterr().out
    show(Context(format="json"), TableOutput([{"id": 1, "more": 2}], columns))
    assert json.loads(capsys.readouterr().out) == [{"id": 1, "more": 2}]
    show(Context(), PropertiesOutput({"status": "running", "log": None}))
    shown = capsys.readouterr().out
    assert "running" in shown
    assert "log" not in shown


def test_announce_prints_sentence_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    announce(Context(), "it is done", {"done": True})
    assert tuple(capsys.readouterr()) == ("", "it is done\n")
    announce(Context(format="json"), "it is done", {"done": True})
    assert tuple(capsys.readouterr()) == ('{\n  "done": true\n}\n', "")


# --- fitting ----------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 4)), min_size=1, max_size=8)


@given(SIZES, st.integers(10, 250))
def test_visible_columns_fit_and_follow_rank(columns: list[tuple[int, int]], screen: int) -> None:
    widths, ranks = [width for width, _ in columns], [rank for _, rank in columns]
    layout = fit_columns(widths, ranks, screen)
    dropped = set(range(len(widths))) - set(layout.visible_columns)
    if not layout.is_table:
        assert not dropped
        return
    assert table_width([min_column_width(widths[i]) for i in layout.visible_columns]) <= screen
    for i in dropped:
        assert ranks[i] >= max(ranks[j] for j in layout.visible_columns)


def test_pipe_has_unlimited_width() -> None:
    assert fit_columns([5000], [9], None).visible_columns == (0,)


def test_long_title_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    title = "Tokens from 2026-11-10 to 2026-11-17 UTC; 8 checkpoints stored, 16.8 MB"
    rows = TableOutput([{"a": "1"}], {"a": Column("A")}, title)
    lines = print_output(capsys, rows, width=40, is_terminal=True).splitlines()
    assert lines[:2] == [
        "Tokens from 2026-11-10 to 2026-11-17",
        "UTC; 8 checkpoints stored, 16.8 MB",
    ]
