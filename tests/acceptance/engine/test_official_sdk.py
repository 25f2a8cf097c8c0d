"""The unmodified official SDK trains, saves and samples real models on a real server."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import pytest

from tests.acceptance.engine import learning_scenarios, tenants_scenarios, weights_scenarios
from tests.acceptance.engine.conftest import Official
from tests.support.engine_server import LocalServer


def test_a_supervised_loop_learns_by_heart(official: Official, server: LocalServer) -> None:
    official.run_scenario(learning_scenarios.learn_by_heart, server)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_a_loop_with_rewards_raises_them(
    official: Official, server: LocalServer, loss_fn: str
) -> None:
    rewards = official.run_scenario(learning_scenarios.earn_rewards, server, loss_fn)
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert last > first + 0.2, rewards


def test_a_loop_with_preferences_widens_the_margin(official: Official, server: LocalServer) -> None:
    official.run_scenario(learning_scenarios.prefer, server)


def test_training_goes_on_from_a_checkpoint_to_the_last_bit(
    official: Official, server: LocalServer
) -> None:
    official.run_scenario(weights_scenarios.go_on, server)


def test_a_checkpoint_that_does_not_fit_is_refused_in_words(
    official: Official, server: LocalServer
) -> None:
    official.run_scenario(weights_scenarios.refuse_what_does_not_fit, server)


def test_trainer_and_sampler_agree(official: Official, server: LocalServer) -> None:
    official.run_scenario(weights_scenarios.agree, server)


@pytest.mark.parametrize("base_model", weights_scenarios.MODELS)
def test_a_downloaded_adapter_is_the_same_in_peft(
    official: Official, server: LocalServer, base_model: str
) -> None:
    official.run_scenario(weights_scenarios.leave_for_peft, server, base_model)


def test_tenants_that_train_at_once_get_what_they_would_get_alone(
    official: Official, server: LocalServer
) -> None:
    models = official.run_scenario(tenants_scenarios.train_at_once, server)
    assert most_at_once(server, models) > 1


def most_at_once(server: LocalServer, models: Sequence[str]) -> int:
    """How many of these models had a pass in one run of the engine, as the server noted it."""
    query = "SELECT started_at, run_id FROM steps WHERE kind = 'forward_backward'"
    with closing(sqlite3.connect(server.home.store_file)) as store:
        moments = Counter(at for at, run_id in store.execute(query) if run_id in models)
    return max(moments.values())


def test_mistakes_of_one_tenant_are_told_to_it_and_harm_no_other(
    official: Official, server: LocalServer
) -> None:
    official.run_scenario(tenants_scenarios.make_mistakes, server)
    official.run_scenario(tenants_scenarios.ask_for_wrong_samples, server)


def test_one_server_has_several_base_models(official: Official, server: LocalServer) -> None:
    official.run_scenario(tenants_scenarios.use_both_models, server)


def test_nothing_of_all_this_was_an_error_of_the_server(
    official: Official, server: LocalServer
) -> None:
    official.run_scenario(tenants_scenarios.use_both_models, server)
    assert "Traceback" not in server.log_text
    errors = [line for line in server.log_text.splitlines() if " ERROR " in line]
    assert [line for line in errors if "was killed by SIGKILL" not in line] == []
