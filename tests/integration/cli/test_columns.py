"""Snapshots of the main tables at 40, 80 and 200 columns.

`python -m tests.integration.cli.test_columns` rewrites the files in `snapshots`; review the
changes before committing them.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tinkex import types
from tinkex.cli.client import Listing
from tinkex.cli.context import Screen
from tinkex.cli.output import Output
from tinkex.cli.output.checkpoints import (
    CheckpointDownload,
    CheckpointInfo,
    CheckpointList,
    FileTotals,
)
from tinkex.cli.output.runs import ModelList, RunInfo, RunList
from tinkex.cli.output.sessions import SessionInfo, SessionList
from tinkex.cli.output.usage import UsageSummary

SNAPSHOTS = Path(__file__).with_name("snapshots")
WIDTHS = (40, 80, 200)
SESSION_ID = "82810c9f-dd83-49e2-8069-20d10792b196"
RUN_IDS = tuple(f"{SESSION_ID}:train:{number}" for number in range(2))
#: In the past, so that times are formatted as dates.
MADE = datetime(2024, 2, 3, 4, 5, 6, tzinfo=UTC)
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-235B-A22B-Instruct-2507")


def saved(run_id: str, name: str, **more: Any) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=name,
        checkpoint_type="sampler" if name.startswith("sampler") else "training",
        time=MADE,
        tinker_path=f"tinker://{run_id}/{name}",
        size_bytes=183_500_800,
        **more,
    )


SAVED = [
    saved(RUN_IDS[0], "weights/step-000500"),
    saved(RUN_IDS[1], "sampler_weights/sft-squad-v2-final", public=True, expires_at=MADE),
]
REPORTED: list[dict[str, Any]] = [
    {"name": "squad", "state": "training", "step": 1500, "metrics": {"loss": 1.25}},
    {"state": "interrupted", "step": 7, "metrics": {"loss": 0.5, "reward": 0.75, "kl": 0.0001}},
]
RUNS = [
    types.TrainingRun(
        training_run_id=run_id,
        base_model=model,
        model_owner="tml:user:586ea7a9",
        is_lora=True,
        lora_rank=32,
        last_request_time=MADE,
        last_checkpoint=SAVED[0],
        last_sampler_checkpoint=SAVED[1],
        user_metadata={"team": "red"},
        created_at=MADE,
        **more,
    )
    for run_id, model, more in zip(RUN_IDS, MODELS, REPORTED, strict=True)
]
SESSION: dict[str, Any] = {
    "session_id": SESSION_ID,
    "created_at": MADE,
    "owner": "tml:user:586ea7a9",
    "project_id": "spring-cleaning",
    "status": {"type": "active"},
    "checkpoints_count": 3,
    "display_name": "squad, second try",
    "user_metadata": {"team": "red"},
    "checkpoint_storage_bytes": 367_001_600,
}
USED = types.BillingUsageResponse(
    data=[
        types.BillingUsageEvent(
            bucket_start=MADE,
            bucket_end=MADE,
            base_model=model,
            session_id=SESSION_ID,
            estimated_cost_usd=1.5,
            event_info=types.TrainingBillingEvent(token_count=1_234_567),
        )
        for model in MODELS
    ]
)
STORED = types.CurrentCheckpointStorageUsageResponse(data=[])
OFFERED = [
    types.SupportedModel(
        model_name=model, max_context_length=32_768, trainable=True, sampleable=True
    )
    for model in MODELS
]
PLACE = Path("/home/anna/models") / f"{SESSION_ID}_train_0_weights_step-000500"

RESULTS: Mapping[str, Output] = {
    "run-list": RunList(Listing(RUNS, 41)),
    "run-info": RunInfo(RUNS[0]),
    "checkpoint-list": CheckpointList(Listing(SAVED, 2)),
    "checkpoint-info": CheckpointInfo(SAVED[1], RUNS[1]),
    "checkpoint-download": CheckpointDownload(
        SAVED[0].tinker_path, PLACE, FileTotals(183_500_800, 3)
    ),
    "session-list": SessionList([SESSION], has_more=True),
    "session-info": SessionInfo(
        SESSION | {"training_run_ids": list(RUN_IDS), "sampler_ids": [f"{SESSION_ID}:sample:0"]}
    ),
    "model-list": ModelList(OFFERED, 2),
    "usage": UsageSummary(USED, STORED, [], MADE, MADE),
}
#: Ids and paths that must be complete in each table.
IMPORTANT: Mapping[str, tuple[str, ...]] = {
    "run-list": RUN_IDS,
    "run-info": (RUN_IDS[0], MODELS[0], *(one.tinker_path for one in SAVED)),
    "checkpoint-list": tuple(one.tinker_path for one in SAVED),
    "checkpoint-info": (SAVED[1].tinker_path, RUN_IDS[1]),
    "checkpoint-download": (SAVED[0].tinker_path, str(PLACE)),
    "session-list": (SESSION_ID,),
    "session-info": (SESSION_ID, *RUN_IDS),
    "model-list": MODELS,
    "usage": MODELS,
}


def render_snapshot(name: str, width: int) -> str:
    """Render a result on a screen without colors."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        RESULTS[name].print("table", Screen(width=width))
    return out.getvalue()


def snapshot(name: str, width: int) -> Path:
    return SNAPSHOTS / f"{name}-{width}.txt"


def joined(text: str) -> str:
    """Join the cells of each column, so that wrapped values are complete."""
    columns: dict[int, str] = {}
    for line in text.splitlines():
        for place, cell in enumerate(re.split("[│┃]", line)):
            columns[place] = columns.get(place, "") + cell.strip()
    return "\n".join([*columns.values(), text])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RESULTS)
def test_table_matches_snapshot(name: str, width: int) -> None:
    file = snapshot(name, width)
    expected = file.read_text("utf-8") if file.exists() else ""
    hint = "`python -m tests.integration.cli.test_columns` rewrites it"
    assert render_snapshot(name, width) == expected, f"{file.name} differs; {hint}"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RESULTS)
def test_folded_ids_and_paths_are_complete(name: str, width: int) -> None:
    text = render_snapshot(name, width)
    whole = joined(text)
    missing = [one for one in IMPORTANT[name] if one not in whole]
    assert missing == []
    assert "\u2026" not in text
    assert "..." not in text
    table = [line for line in text.splitlines() if re.match("[│┃┏└]", line)]
    assert all(len(line) <= width for line in table)


def test_no_unused_snapshots() -> None:
    expected = {snapshot(name, width).name for name in RESULTS for width in WIDTHS}
    assert {file.name for file in SNAPSHOTS.iterdir()} == expected


def write_all() -> None:
    """Rewrite all snapshots."""
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in RESULTS:
        for width in WIDTHS:
            snapshot(name, width).write_text(render_snapshot(name, width), "utf-8")


if __name__ == "__main__":
    write_all()
