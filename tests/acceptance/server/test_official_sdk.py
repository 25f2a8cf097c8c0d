"""The unmodified official SDK: all public methods against a real server."""

from __future__ import annotations

import pytest

from tests.acceptance.server import (
    busy_scenarios,
    jwt_scenarios,
    rest_scenarios,
    sampling_scenarios,
    training_scenarios,
    weights_scenarios,
)
from tests.acceptance.server.conftest import Official, Scenario
from tests.acceptance.server.surface import public_methods
from tests.support.real_server import RealServer

PLAIN = (
    *training_scenarios.SCENARIOS,
    *sampling_scenarios.SCENARIOS,
    *weights_scenarios.SCENARIOS,
    *rest_scenarios.SCENARIOS,
)
#: Called on the SDK's own event loop, which is not traced; awaited elsewhere they raise
#: "AsyncTinker client called from incorrect event loop" with any server.
ON_ITS_LOOP = {"AdminClient.get_audit_log_async", "RestClient.get_audit_log_async"}


def name_of(scenario: Scenario) -> str:
    return scenario.__name__


@pytest.mark.parametrize("scenario", PLAIN, ids=name_of)
def test_the_official_sdk_works(
    official: Official, real_server: RealServer, scenario: Scenario
) -> None:
    official.drive(scenario, real_server)


@pytest.mark.parametrize("scenario", jwt_scenarios.SCENARIOS, ids=name_of)
def test_official_sdk_over_alternative_paths(
    official: Official, jwt_server: RealServer, scenario: Scenario
) -> None:
    official.drive(scenario, jwt_server)


@pytest.mark.parametrize("scenario", busy_scenarios.SCENARIOS, ids=name_of)
def test_official_sdk_with_busy_server(
    official: Official, busy_server: RealServer, scenario: Scenario
) -> None:
    official.drive(scenario, busy_server)


@pytest.fixture
def driven(
    official: Official, real_server: RealServer, jwt_server: RealServer, busy_server: RealServer
) -> set[str]:
    """The methods that all scenarios call; finished scenarios are not run again."""
    called: set[str] = set()
    for scenarios, server in (
        (PLAIN, real_server),
        (jwt_scenarios.SCENARIOS, jwt_server),
        (busy_scenarios.SCENARIOS, busy_server),
    ):
        for scenario in scenarios:
            called |= official.drive(scenario, server)
    return called


def test_every_public_method_is_called(driven: set[str]) -> None:
    assert sorted(public_methods() - driven - ON_ITS_LOOP) == []


def test_every_endpoint_was_used_without_server_errors(
    driven: set[str], real_server: RealServer, jwt_server: RealServer, busy_server: RealServer
) -> None:
    assert driven
    plain, jwt, busy = real_server.answers(), jwt_server.answers(2), busy_server.answers()
    for server, answers in ((real_server, plain), (jwt_server, jwt), (busy_server, busy)):
        assert [each for each in answers if each[1] >= 500] == []
        assert "Traceback" not in server.log and " ERROR " not in server.log
        assert answers["telemetry", 200] and answers["create_session", 200]
    assert plain["forward_backward", 200] > plain["optim_step", 200] > 0
    assert plain["retrieve_futures", 200] == plain["auth_token", 200] == 0
    for road in ("retrieve_futures", "join_sampling_session", "auth_token", "load_weights"):
        assert jwt[road, 200] > 0, road
    # A result whose size is sent first is requested twice.
    assert jwt["retrieve_future", 200] > jwt["asample", 200] + jwt["forward_backward", 200]
    assert busy["asample", 429] > 0
    assert busy["cancel_future", 200] > 0
