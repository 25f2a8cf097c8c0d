"""`run list`, `run info`, `checkpoint list` and `checkpoint info` against a server."""

from __future__ import annotations

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import BASE_MODEL, KEY, Connect, Serve
from tinkex.testing import Fault


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


def test_runs_are_listed_newest_first(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("run", "list", "--json").json
    assert [run["training_run_id"] for run in found["runs"]] == seeded.run_ids[::-1]
    assert (found["total"], found["shown"]) == (2, 2)
    shown = tinkex("run", "list").out
    assert shown.startswith("2 training runs\n")
    assert all(run_id in shown for run_id in seeded.run_ids)
    assert "Finished" in shown
    assert "Rank 8" in tinkex("run", "list", "-c", "id,lora").out


def test_limit_reports_hidden_items(seeded: SeededServer, tinkex: RunCli) -> None:
    assert tinkex("run", "list", "--limit", "1").out.startswith(
        "1 training run (1 more not shown, use --limit to see more)\n"
    )
    found = tinkex("-f", "json", "checkpoint", "list", "--limit", "1").json
    assert (found["total"], found["shown"], len(found["checkpoints"])) == (2, 1, 1)


def test_runs_filtered_by_project(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("run", "list", "--project-id", "p-1", "--json").json
    assert [run["training_run_id"] for run in found["runs"]] == seeded.run_ids[:1]
    assert seeded.server.calls("list_training_runs")[-1].query["project_id"] == "p-1"


def test_columns_are_chosen_by_name(seeded: SeededServer, tinkex: RunCli) -> None:
    shown = tinkex("run", "list", "-c", "checkpoint,owner,id").out
    assert "Last Checkpoint" in shown
    assert "Base Model" not in shown
    assert "weights/0001" in shown
    refused = tinkex("run", "list", "-c", "id,colour")
    assert (refused.exit_code, refused.out) == (2, "")
    assert "'colour' is not a column; available: id, name, status" in refused.err


def test_long_lists_are_fetched_in_pages(serve: Serve, connect: Connect, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY})
    service = connect(server)
    for _ in range(103):
        service.create_lora_training_client(BASE_MODEL, rank=1)
    where = ("--base-url", server.url, "--api-key", KEY, "--json")
    assert tinkex("run", "list", *where).json["shown"] == 20
    assert tinkex("run", "list", "--limit", "0", *where).json["shown"] == 103
    asked = [
        (call.query["limit"], call.query["offset"]) for call in server.calls("list_training_runs")
    ]
    assert asked == [("20", "0"), ("100", "0"), ("3", "100")]


def test_checkpoints_of_all_runs_and_of_one(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("checkpoint", "list", "--limit", "0", "--json").json
    paths = [saved["tinker_path"] for saved in found["checkpoints"]]
    assert sorted(paths) == sorted([seeded.training, seeded.sampler])
    assert "run_id" not in found
    assert seeded.server.calls("list_user_checkpoints")[-1].query["limit"] == "1000"
    of_run = tinkex("checkpoint", "list", "--run-id", seeded.run_ids[1], "--json").json
    assert (of_run["run_id"], of_run["total"]) == (seeded.run_ids[1], 2)
    empty = tinkex("checkpoint", "list", "--run-id", seeded.run_ids[0])
    assert empty.out == f"No checkpoints found for run {seeded.run_ids[0]}\n"


def test_checkpoints_are_filtered_by_the_server(seeded: SeededServer, tinkex: RunCli) -> None:
    def paths(*words: str) -> list[str]:
        found = tinkex("checkpoint", "list", "--json", *words).json
        assert found["total"] == found["shown"]
        return [saved["tinker_path"] for saved in found["checkpoints"]]

    assert paths("--type", "sampler") == [seeded.sampler]
    both = ["--base-model", "other", "--base-model", "tinkex/bigram"]
    assert sorted(paths(*both)) == sorted([seeded.training, seeded.sampler])
    assert paths("--base-model", "other") == paths("--metadata", "team=blue") == []
    shown = tinkex("checkpoint", "list", "--type", "sampler", "-c", "id,model").out
    assert "tinkex/bigram" in shown
    refused = tinkex("checkpoint", "list", "--run-id", seeded.run_ids[1], "--type", "sampler")
    assert (refused.exit_code, "--run-id cannot be combined" in refused.err) == (2, True)
    seeded.server.inject("search_checkpoints", Fault(status=404))
    old = tinkex("checkpoint", "list", "--type", "sampler")
    assert (old.exit_code, "cannot search checkpoints" in old.err) == (1, True)


def test_run_info_shows_metadata_and_checkpoints(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("run", "info", seeded.run_ids[1], "--json").json
    assert (found["lora_rank"], found["user_metadata"]) == (8, {"team": "red"})
    assert found["last_checkpoint"]["tinker_path"] == seeded.training
    shown = tinkex("run", "info", seeded.run_ids[1]).out
    for text in (seeded.training, seeded.sampler, "Yes (Rank 8)", "- team", "Finished"):
        assert text in shown


def test_checkpoint_info(seeded: SeededServer, tinkex: RunCli) -> None:
    found = tinkex("checkpoint", "info", seeded.sampler, "--json").json
    assert (found["checkpoint_type"], found["lora_rank"]) == ("sampler", 8)
    shown = tinkex("checkpoint", "info", seeded.training).out
    for text in (seeded.training, seeded.run_ids[1], "training", "Yes (Rank 8)", "Never"):
        assert text in shown


def test_unknown_and_invalid_checkpoint_paths_are_reported(
    seeded: SeededServer, tinkex: RunCli
) -> None:
    missing = tinkex("checkpoint", "info", seeded.training + "x", "--json")
    assert missing.exit_code == 1
    assert missing.failure["message"] == f"Checkpoint not found: {seeded.training}x"
    assert f"--run-id {seeded.run_ids[1]}" in missing.failure["hint"]
    for path in ("x", "tinker://r/weights", "tinker:///weights/1"):
        assert "Invalid tinker path" in tinkex("checkpoint", "info", path).err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "info"),
        ("run", "info", "a", "b"),
        ("run", "list", "--limit", "-1"),
        ("run", "list", "--ttl", "3"),
        ("checkpoint", "list", "--limit", "x"),
    ],
)
def test_invalid_option_sends_no_request(
    words: tuple[str, ...], seeded: SeededServer, tinkex: RunCli
) -> None:
    before = len(seeded.server.calls())
    refused = tinkex(*words)
    assert (refused.exit_code, refused.out) == (2, "")
    assert "Usage: tinkex" in refused.err
    assert len(seeded.server.calls()) == before
