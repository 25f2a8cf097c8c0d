"""Models, usage, traces and whoami: JSON equals the official CLI."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.cli.test_official_shapes import ADDED, OFFICIAL, official, same_times
from tests.integration.conftest import KEY, Serve
from tinkex.client import rest

pytestmark = pytest.mark.skipif(
    not OFFICIAL.exists(), reason="the official command line is not installed"
)


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


def test_models_and_storage_match_official_cli(seeded: SeededServer, tinkex: RunCli) -> None:
    for words in (
        ("model", "list"),
        ("model", "list", "BIGRAM"),
        ("billing", "checkpoint-storage"),
    ):
        ours = tinkex(*words, "--json").json
        shared = {key: value for key, value in ours.items() if key not in ADDED}
        assert same_times(shared) == same_times(official(*words)), words


def test_usage_matches_official_cli(seeded: SeededServer, tinkex: RunCli) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = [(hour + timedelta(hours=n)).isoformat().replace("+00:00", "Z") for n in (-2, 2)]
    ours, theirs = (
        tinkex("billing", "usage", *span, "--json").json,
        official("billing", "usage", *span),
    )
    for found in (ours, theirs):
        # Grows with time.
        stored = [row["event_info"].pop("gigabyte_hours", None) for row in found["data"]]
        assert [hours for hours in stored if hours is not None] != []
    assert same_times(ours) == same_times(theirs)


def test_trace_url_matches_official_cli(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "TRACE_POLL_SECONDS", 0.01)
    words = ("session", "export-trace", next(iter(seeded.server.sessions)), "--url-only")
    ours, theirs = tinkex(*words, "--json").json, official(*words)
    # The signature changes with the second in which it is made.
    urls = [each.pop("url").partition("?")[0] for each in (ours, theirs)]
    assert (urls[0], ours) == (urls[1], theirs)


def test_whoami_matches_official_cli(
    serve: Serve, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(api_keys={KEY}, client_config={"pjwt_auth_enabled": True})
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert tinkex("auth", "whoami", "--json").json == official("auth", "whoami")
