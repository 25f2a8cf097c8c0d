"""Output of sessions and usage at 40, 80 and 200 columns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tinkex import types
from tinkex.cli.context import Screen
from tinkex.cli.output.sessions import (
    SessionInfo,
    SessionList,
    default_session_columns,
    format_session_state,
)
from tinkex.cli.output.usage import UsageSummary, UsageTable, format_usd, sum_usage

ID = "5fce6180-e46c-4ceb-b11d-1fdc4ed0ac70"
SESSION: dict[str, Any] = {
    "session_id": ID,
    "created_at": datetime(2026, 1, 2, tzinfo=UTC),
    "owner": "tml:user:1",
    "project_id": "p",
    "status": {"type": "failed", "category": "user", "message": "no such model"},
    "checkpoints_count": 3,
    "display_name": "a name",
    "user_metadata": {"team": "red"},
    "checkpoint_storage_bytes": 2048,
}
HOUR = datetime(2026, 1, 2, 3, tzinfo=UTC)
SPAN = (HOUR, datetime(2026, 1, 3, 3, tzinfo=UTC))


def used(*events: Any, model: str = "m", cost: float | None = None) -> list[Any]:
    return [
        types.BillingUsageEvent(
            bucket_start=HOUR,
            bucket_end=HOUR.replace(hour=4),
            base_model=model,
            session_id=ID,
            estimated_cost_usd=cost,
            event_info=event,
        )
        for event in events
    ]


USED = types.BillingUsageResponse(
    data=[
        *used(types.TrainingBillingEvent(token_count=1_234_567), cost=1.5),
        *used(types.SamplingPrefillBillingEvent(cached=True, token_count=8)),
        *used(types.SamplingPrefillBillingEvent(cached=False, token_count=5)),
        *used(types.SamplingSampleBillingEvent(token_count=4), model="n"),
        *used(types.CheckpointBillingEvent(count=2)),
        *used(types.StorageBillingEvent(gigabyte_hours=0.5), cost=0.001),
    ]
)
NOTHING = types.CurrentCheckpointStorageUsageResponse(data=[])


def columns_of(shown: str) -> list[str]:
    """Return the text of each table column with wrapped lines joined."""
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    return ["".join(cell.strip() for cell in column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_ids_are_complete_at_every_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"training_run_ids": [f"{ID}:train:0"], "sampler_ids": []}
    for result in (SessionList([SESSION], False), SessionInfo(SESSION | made)):
        result.print(screen=Screen(width=width))
        shown = capsys.readouterr().out
        assert ID in shown or any(ID in text for text in columns_of(shown))
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines() if line.startswith("│"))


def test_narrow_screen_keeps_hour_and_amount(capsys: pytest.CaptureFixture[str]) -> None:
    UsageTable(USED).print(screen=Screen(width=56))
    shown = capsys.readouterr().out
    for text in ("2026-01-02 03:00", "Prompt (cached)", "1,234,567"):
        assert text in shown
    assert "Session" not in shown


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0.0007177166478875142, "0.0007177"), (0.5, "0.5"), (12345.678, "12,345.68")],
)
def test_gigabyte_hours_have_few_digits(
    hours: float, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = used(types.StorageBillingEvent(gigabyte_hours=hours))
    UsageTable(types.BillingUsageResponse(data=stored)).print(screen=Screen(width=200))
    assert f" {text} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (None, "Unknown"),
        ({"type": "active"}, "Active"),
        ({"type": "cancelled"}, "Cancelled"),
        ({"type": "failed"}, "Failed"),
        ({"type": "new"}, "Unknown"),
        ({"type": "client_finished", "reason": {"type": "success"}}, "Finished"),
        ({"type": "client_finished", "reason": {"type": "errored"}}, "Errored"),
        ({"type": "client_finished", "reason": None}, "Finished"),
    ],
)
def test_session_state_labels(status: Any, word: str) -> None:
    assert format_session_state({"status": status}) == word


def test_failed_session_shows_message(capsys: pytest.CaptureFixture[str]) -> None:
    SessionInfo(SESSION | {"training_run_ids": [], "sampler_ids": ["s"]}).print()
    shown = capsys.readouterr().out
    for text in ("Failed", "no such model", "red", "a name"):
        assert text in shown


def test_sums_by_model() -> None:
    summary = UsageSummary(USED, NOTHING, [], *SPAN)
    found = summary.to_dict()
    assert [row["base_model"] for row in found["models"]] == ["m", "n"]
    assert found["models"][0]["trained_tokens"] == 1_234_567
    assert found["total"] == {
        "trained_tokens": 1_234_567,
        "prompt_tokens": 5,
        "cached_prompt_tokens": 8,
        "sampled_tokens": 4,
        "checkpoints": 2,
        "estimated_cost_usd": 1.501,
    }
    assert found["models"][1]["estimated_cost_usd"] is None
    assert summary.rows()[-1][:2] == ["All models", "1,234,567"]
    assert "0 checkpoints stored, 0 B" in summary.title()
    assert sum_usage([])["estimated_cost_usd"] is None


def test_usage_rows_and_title() -> None:
    rows = UsageTable(USED).rows()
    assert rows[0][:4] == ["2026-01-02 03:00", "Trained", "1,234,567", "m"]
    assert [row[1] for row in rows[1:3]] == ["Prompt (cached)", "Prompt"]
    assert rows[5][1:3] == ["Storage GB h", "0.5"]
    assert UsageTable(USED).title() == "6 hourly rows of usage"


def test_format_usd() -> None:
    assert [format_usd(x) for x in (None, 0, 0.00123, 0.5, 1234.5)] == [
        "N/A",
        "0",
        "0.00123",
        "0.50",
        "1,234.50",
    ]


def test_sessions_without_names_have_no_column_for_them() -> None:
    assert "name" not in default_session_columns([{"session_id": "a"}])
    assert "name" in default_session_columns(
        [{"session_id": "a"}, {"session_id": "b", "display_name": "x"}]
    )
