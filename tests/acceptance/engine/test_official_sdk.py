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


def test_supervised_loop_memorizes(official: Official, server: LocalServer) -> None:
    official.run_scenario(learning_scenarios.supervised_loop, server)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_rl_loop_increases_reward(official: Official, server: LocalServer, loss_fn: str) -> None:
    rewards = official.run_scenario(learning_scenarios.rl_loop, server, loss_fn)
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert last > first + 0.2, rewards


def test_dpo_loop_increases_margin(official: Official, server: LocalServer) -> None:
    official.run_scenario(learning_scenarios.dpo_loop, server)


def test_training_resumes_bit_identically(official: Official, server: LocalServer) -> None:
    official.run_scenario(weights_scenarios.resume_from_checkpoint, server)


def test_mismatched_checkpoint_message(official: Official, server: LocalServer) -> None:
    official.run_scenario(weights_scenarios.reject_mismatched_checkpoint, server)


def test_trainer_and_sampler_agree(official: Official, server: LocalServer) -> None:
    official.run_scenario(weights_scenarios.compare_trainer_and_sampler, server)


@pytest.mark.parametrize("base_model", weights_scenarios.MODELS)
def test_downloaded_adapter_matches_peft(
    official: Official, server: LocalServer, base_model: str
) -> None:
    official.run_scenario(weights_scenarios.compare_with_peft, server, base_model)


def test_concurrent_tenants_are_independent(official: Official, server: LocalServer) -> None:
    models = official.run_scenario(tenants_scenarios.train_concurrently, server)
    assert max_models_per_run(server, models) > 1


def max_models_per_run(server: LocalServer, models: Sequence[str]) -> int:
    """The maximum number of these models that shared an engine run."""
    query = "SELECT started_at, run_id FROM steps WHERE kind = 'forward_backward'"
    with closing(sqlite3.connect(server.home.store_file)) as store:
        moments = Counter(at for at, run_id in store.execute(query) if run_id in models)
    return max(moments.values())


def test_invalid_requests_do_not_affect_other_tenants(
    official: Official, server: LocalServer
) -> None:
    official.run_scenario(tenants_scenarios.send_invalid_requests, server)
    official.run_scenario(tenants_scenarios.send_invalid_sample_requests, server)


def test_several_base_models(official: Official, server: LocalServer) -> None:
    official.run_scenario(tenants_scenarios.use_both_models, server)


def test_server_log_has_no_errors(official: Official, server: LocalServer) -> None:
    official.run_scenario(tenants_scenarios.use_both_models, server)
    assert "Traceback" not in server.log_text
    errors = [line for line in server.log_text.splitlines() if " ERROR " in line]
    assert [line for line in errors if "was killed by SIGKILL" not in line] == []
