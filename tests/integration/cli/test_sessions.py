"""`session list`, `info`, `finish` and `export-trace` against a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import KEY, TIMEOUT_SECONDS, Connect, Serve
from tinkex.cli.commands.session import find
from tinkex.client import rest
from tinkex.testing import Fault


@pytest.fixture(autouse=True)
def quick_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "TRACE_POLL_SECONDS", 0.01)


@pytest.fixture
def session_ids(seeded: SeededServer) -> list[str]:
    """Session ids, newest first."""
    return list(seeded.server.sessions)[::-1]


def test_sessions_are_listed_newest_first(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli
) -> None:
    found = tinkex("session", "list", "--json").json
    assert [row["session_id"] for row in found["sessions"]] == session_ids
    assert (found["total"], found["shown"], found["has_more"]) == (2, 2, False)
    assert found["sessions"][0]["status"] == {"type": "active"}
    shown = tinkex("session", "list").out
    assert shown.startswith("2 sessions\n")
    assert "Active" in shown


def test_limit_reports_more_sessions(seeded: SeededServer, tinkex: RunCli) -> None:
    assert tinkex("session", "list", "--limit", "1").out.startswith(
        "1 session (more not shown, use --limit to see more)\n"
    )
    found = tinkex("session", "list", "--limit", "1", "--json").json
    assert (found["total"], found["shown"], found["has_more"]) == (None, 1, True)


def test_sessions_are_filtered_by_the_server(
    seeded: SeededServer, connect: Connect, tinkex: RunCli
) -> None:
    named = connect(seeded.server, user_metadata={"team": "blue"})
    named.create_lora_training_client("tinkex/bigram", rank=1)
    named.close().result(TIMEOUT_SECONDS)
    newest = list(seeded.server.sessions)[-1]

    def ids(*words: str) -> list[str]:
        found = tinkex("session", "list", "--json", *words).json["sessions"]
        return [row["session_id"] for row in found]

    assert ids("--status", "finished") == [newest]
    assert newest not in ids("--status", "active")
    assert len(ids("--status", "active", "--status", "finished")) == 3
    assert ids("--metadata", "team=blue") == [newest]
    assert len(ids("--project-id", "p-1")) == 1
    assert ids("--name", "nothing like it") == []
    assert tinkex("session", "list", "--name", "zzz").out == "No sessions found\n"


def test_columns_are_chosen_by_name(seeded: SeededServer, tinkex: RunCli) -> None:
    shown = tinkex("session", "list", "-c", "project,id").out
    assert "p-1" in shown
    assert "Status" not in shown
    assert tinkex("session", "list", "-c", "colour").exit_code == 2
    assert "is not a KEY=VALUE pair" in tinkex("session", "list", "--metadata", "x").err


def test_long_lists_are_fetched_in_pages(
    serve: Serve, connect: Connect, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(api_keys={KEY})
    for _ in range(5):
        connect(server).create_sampling_client(base_model="tinkex/bigram")
    monkeypatch.setattr(find, "PAGE_SIZE", 2)
    where = ("--base-url", server.url, "--api-key", KEY, "--json")
    assert tinkex("session", "list", "--limit", "0", *where).json["total"] == 5
    found = tinkex("session", "list", "--limit", "3", *where).json
    assert (found["shown"], found["has_more"]) == (3, True)
    assert len(server.calls("search_sessions")) == 3 + 2


def test_a_server_without_search_lists_ids(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli
) -> None:
    seeded.server.inject("search_sessions", Fault(status=404), times=None)
    found = tinkex("session", "list", "--json").json
    assert [row["session_id"] for row in found["sessions"]] == session_ids
    found = tinkex("session", "list", "--json", "--limit", "1").json
    assert (found["shown"], found["has_more"]) == (1, True)
    assert tinkex("session", "info", session_ids[0], "--json").json["sampler_ids"] == []
    refused = tinkex("session", "list", "--status", "active", "--json")
    assert "cannot search sessions" in refused.failure["message"]


def test_session_info_shows_runs_status_and_project(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli
) -> None:
    found = tinkex("session", "info", session_ids[0], "--json").json
    assert found["training_run_ids"] == [seeded.run_ids[1]]
    assert (found["status"], found["project_id"]) == ({"type": "active"}, "p-2")
    shown = tinkex("session", "info", session_ids[0]).out
    for text in (session_ids[0], seeded.run_ids[1], "Active", "p-2"):
        assert text in shown


@pytest.mark.parametrize("verb", ["info", "finish", "export-trace"])
def test_unknown_session_is_reported_with_a_hint(
    verb: str, seeded: SeededServer, tinkex: RunCli
) -> None:
    missing = tinkex("session", verb, "nosuch", "--json")
    assert (missing.exit_code, missing.failure["message"]) == (1, "Session not found: nosuch")
    assert "session list" in missing.failure["hint"]


def test_finishing_a_session(seeded: SeededServer, session_ids: list[str], tinkex: RunCli) -> None:
    result = tinkex("session", "finish", session_ids[0], "--status", "errored", "--detail", "stuck")
    assert (result.exit_code, result.out) == (0, "")
    assert result.err == f"Session {session_ids[0]} is finished.\n"
    assert seeded.server.finish_reasons == {session_ids[0]: "errored"}
    assert seeded.server.sessions[session_ids[0]].finish_detail == "stuck"
    assert tinkex("session", "finish", session_ids[1], "--json").json == {
        "session_id": session_ids[1],
        "finished": True,
        "status": "interrupted",
    }


# --- traces -------------------------------------------------------------------------------------


def test_trace_is_written_to_a_file(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "mine.pftrace"
    found = tinkex("session", "export-trace", session_ids[0], "-o", str(place), "--json").json
    assert json.loads(place.read_text())["otherData"]["session_id"] == session_ids[0]
    assert found == {
        "session_id": session_ids[0],
        "destination": str(place),
        "file_size_bytes": place.stat().st_size,
    }
    assert [path.name for path in place.parent.iterdir()] == ["mine.pftrace"]


def test_trace_default_path_and_directory(
    seeded: SeededServer,
    session_ids: list[str],
    tinkex: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = tinkex("session", "export-trace", session_ids[0])
    name = f"{session_ids[0]}.pftrace"
    assert (tmp_path / name).is_file()
    assert "Saved to" in result.out
    assert result.err.startswith("Exporting the trace")
    (tmp_path / "traces").mkdir()
    assert tinkex("session", "export-trace", session_ids[0], "-o", "traces").exit_code == 0
    assert (tmp_path / "traces" / name).is_file()


def test_url_only_prints_the_trace_url(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli
) -> None:
    words = ("session", "export-trace", session_ids[0], "--url-only")
    url = tinkex(*words).out
    assert url.startswith(seeded.server.url)
    assert len(url.split()) == 1
    found = tinkex(*words, "--json").json
    assert found["session_id"] == session_ids[0]
    # The signature changes with the second in which it is made.
    assert found["url"].partition("?")[0] == url.partition("?")[0]


def test_failed_trace_download_keeps_old_file(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli, tmp_path: Path
) -> None:
    place = tmp_path / "cut.pftrace"
    place.write_text("the old one")
    seeded.server.inject("download", Fault(status=404), times=None)
    failed = tinkex("session", "export-trace", session_ids[0], "-o", str(place))
    assert failed.exit_code == 1
    assert "Cannot download cut.pftrace" in failed.err
    assert place.read_text() == "the old one"


def test_truncated_trace_download_is_repeated(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli, tmp_path: Path
) -> None:
    place = tmp_path / "cut.pftrace"
    seeded.server.inject("download", Fault(cut_after_bytes=10))
    found = tinkex("session", "export-trace", session_ids[0], "-o", str(place), "--json").json
    assert json.loads(place.read_text())["otherData"]["session_id"] == session_ids[0]
    assert found["file_size_bytes"] == place.stat().st_size > 10
    # From the start: a trace has no ETag, because it grows with its session.
    ranges = [call.headers.get("range") for call in seeded.server.calls("download")]
    assert ranges == [None, None]


def test_failed_export_is_reported(
    seeded: SeededServer, session_ids: list[str], tinkex: RunCli
) -> None:
    seeded.server.inject("export_session_trace", Fault(status=422), times=None)
    failed = tinkex("session", "export-trace", session_ids[0], "--json")
    assert (failed.exit_code, failed.failure["status"]) == (1, 422)
