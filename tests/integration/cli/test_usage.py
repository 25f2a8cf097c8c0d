"""`usage` and `billing` against a server: sums, rows and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import BASE_MODEL, PROMPT, SHORT, TIMEOUT_SECONDS, Connect, datum


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


@pytest.fixture
def busy(own_seeded: SeededServer, connect: Connect) -> SeededServer:
    """A server after some training and sampling."""
    service = connect(own_seeded.server, user_metadata={"team": "red"})
    training = service.create_lora_training_client(BASE_MODEL, rank=1)
    training.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    sampling = service.create_sampling_client(base_model=BASE_MODEL)
    sampling.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    return own_seeded


def test_a_summary_by_model(busy: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("usage", "--json").json
    [model] = found["models"]
    assert (model["base_model"], model["trained_tokens"]) == (BASE_MODEL, 16)
    assert (model["prompt_tokens"], model["sampled_tokens"]) == (5, 4)
    assert model["checkpoints"] == found["total"]["checkpoints"] == 2
    assert found["storage"]["checkpoint_count"] == 2
    assert found["quotas"]["checkpoints"] == {"used": 2, "limit": None}
    shown = tinkex("usage", "--days", "1").out
    assert shown.startswith("Tokens from ")
    assert "Quota" not in shown
    assert "2 checkpoints stored" in shown
    assert BASE_MODEL in shown


def test_period_without_usage_is_reported(seeded: SeededServer, tinkex: RunCli) -> None:
    span = ("2020-01-01", "2020-01-02")
    assert tinkex("usage", "tokens", *span).out == "No usage in this period\n"
    assert tinkex("usage", "tokens", *span, "--json").json == {
        "data": [],
        "sessions": {},
        "cost_data_through": None,
    }


def test_usage_tokens_lists_hourly_rows(busy: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("usage", "tokens", "--json").json
    assert set(found) == {"data", "sessions", "cost_data_through"}
    assert {"type": "training", "token_count": 16} in [row["event_info"] for row in found["data"]]
    assert {"user_metadata": {"team": "red"}} in found["sessions"].values()
    shown = tinkex("usage", "tokens").out
    for text in ("hourly rows of usage", "Trained", "Prompt", "Sampled", "16"):
        assert text in shown


def test_rows_as_csv(busy: SeededServer, tinkex: RunCli, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(tinkex("usage", "tokens", "--csv", "-").out)))
    [trained] = [row for row in rows if row["type"] == "training"]
    assert (trained["token_count"], trained["base_model"]) == ("16", BASE_MODEL)
    places = [str(tmp_path / "new" / name) for name in ("rows.csv", "sessions.csv")]
    words = ("billing", "usage", "--csv", places[0], "--sessions-csv", places[1])
    result = tinkex(*words, "--json").json
    assert (result["csv"], result["rows"]) == (places[0], len(rows))
    assert len(Path(places[0]).read_text().splitlines()) == len(rows) + 1
    assert '"{""team"": ""red""}"' in Path(places[1]).read_text()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "rows.csv",
        "sessions.csv",
    ]
    assert tinkex(*words).err == f"Wrote {places[0]} and {places[1]}\n"


def test_only_one_output_on_stdout(seeded: SeededServer, tinkex: RunCli) -> None:
    before = len(seeded.server.calls())
    for words in (
        ("usage", "tokens", "--csv", "-", "--sessions-csv", "-"),
        ("usage", "tokens", "--csv", "-", "--json"),
        ("usage", "storage", "--csv", "-", "--json"),
    ):
        assert tinkex(*words).exit_code == 2
    assert len(seeded.server.calls()) == before


def test_unwritable_csv_is_an_error(seeded: SeededServer, tinkex: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = tinkex("usage", "storage", "--csv", str(tmp_path / "file" / "x.csv"))
    assert (failed.exit_code, failed.err.startswith("Error: ")) == (1, True)
    assert "Unexpected" not in failed.err


def test_usage_storage_prints_table_json_and_csv(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("usage", "storage", "--json").json
    assert set(found) == {"effective_rate_usd_per_gigabyte_month", "data"}
    assert found["data"][0]["checkpoint_count"] == 2
    assert tinkex("billing", "checkpoint-storage", "--json").json == found
    assert "Current checkpoint storage" in tinkex("usage", "storage").out
    rows = list(csv.DictReader(io.StringIO(tinkex("usage", "storage", "--csv", "-").out)))
    assert rows[0]["checkpoint_count"] == "2"
    tinkex("usage", "storage", "--project-id", "p-9")
    [*_, last] = seeded.server.calls("get_current_checkpoint_storage_usage")
    assert last.query["project_id"] == "p-9"
