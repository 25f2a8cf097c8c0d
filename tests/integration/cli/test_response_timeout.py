"""A server that accepts connections but never responds is reported quickly."""

from __future__ import annotations

from tests.integration.cli.conftest import RunCli, SeededServer
from tinkex.cli.client import build_config
from tinkex.cli.context import Context
from tinkex.testing import Fault


def test_silent_server_fails_within_five_seconds(seeded: SeededServer, tinkex: RunCli) -> None:
    assert tinkex("run", "list").exit_code == 0
    *_, first = seeded.server.calls("client_config")
    assert float(first.headers["x-stainless-read-timeout"]) < 5.0


def test_timeout_option_is_respected(seeded: SeededServer, tinkex: RunCli) -> None:
    assert build_config(Context(timeout_seconds=8.0)).first_answer_seconds == 8.0
    seeded.server.inject("client_config", Fault(delay_seconds=60.0), times=None)
    refused = tinkex("run", "list", "--timeout", "50ms", "--json")
    assert refused.exit_code == 1
    assert refused.failure["message"].startswith("Request timeout: 127.0.0.1:")
    assert "--timeout" in refused.failure["hint"]
