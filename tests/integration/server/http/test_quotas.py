"""Tenant quotas: enforced in the transaction, with an error message, and reported."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.resources import create_checkpoint, create_model, create_ready_model
from tests.support.server_harness import BASE_MODEL, OTHER_KEY, ServerHarness, open_harness
from tinkex.store import accounting, quotas
from tinkex.store.schema import sessions


def save(harness: ServerHarness, run_id: str, seq_id: int, **fields: Any) -> Any:
    return harness.post("/save_weights", {"model_id": run_id, "seq_id": seq_id, **fields})


def use_tokens(harness: ServerHarness, amount: int) -> None:
    harness.write(
        lambda db: accounting.add_usage(
            db,
            tenant_id=harness.tenant_id,
            session_id="s",
            run_id=None,
            base_model=BASE_MODEL,
            kind="training",
            amount=amount,
            now=time.time(),
        )
    )


def sample(harness: ServerHarness, session_id: str, seq_id: int, max_tokens: int = 10) -> Any:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler_id = harness.post("/create_sampling_session", body).json()["sampling_session_id"]
    request = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens},
        "num_samples": 1,
    }
    return harness.post("/asample", request)


def test_no_quotas_by_default(tmp_path: Path) -> None:
    with open_harness(tmp_path) as harness:
        create_ready_model(harness, harness.session())
        reported = harness.send_request("GET", "/usage/quotas").json()["quotas"]
        assert [(quota["name"], quota.get("limit")) for quota in reported] == [
            ("models", None),
            ("checkpoints", None),
            ("stored_bytes", None),
            ("tokens_per_hour", None),
            ("sessions_per_hour", None),
        ]
        assert reported[0]["used"] == 1


def test_model_quota_counts_unfinished_sessions(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_models_per_tenant=2) as harness:
        one, other = harness.session(), harness.session()
        create_ready_model(harness, one)
        assert create_model(harness, other).status_code == 200
        # The same request again is the same model.
        assert create_model(harness, other).status_code == 200
        refused = create_model(harness, other, model_seq_id=1)
        assert refused.status_code == 403
        sentence = refused.json()["error"]
        assert sentence.startswith("quota exceeded: 2 of 2 models are in use (quota 'models')")
        assert "tinkex session finish" in sentence
        assert create_model(harness, harness.session(OTHER_KEY), OTHER_KEY).status_code == 200
        harness.post(f"/sessions/{one}/finish", {"reason": {"type": "success"}})
        assert create_model(harness, other, model_seq_id=1).status_code == 200


def test_concurrent_requests_respect_quota(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_models_per_tenant=3) as harness:
        session_id = harness.session()
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(
                lambda number: create_model(harness, session_id, model_seq_id=number), range(16)
            )
            statuses = [answer.status_code for answer in answers]
        assert sorted(statuses) == [200] * 3 + [403] * 13


def test_checkpoint_quota_allows_replacement(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_checkpoints_per_tenant=2) as harness:
        run_id = create_ready_model(harness, harness.session())
        create_checkpoint(harness, run_id, "a")
        create_checkpoint(harness, run_id, ".unnamed", "sampler_weights", is_ephemeral=True)
        assert save(harness, run_id, 1, path="b").status_code == 200
        create_checkpoint(harness, run_id, "b")
        refused = save(harness, run_id, 2, path="c")
        assert refused.status_code == 403
        assert "2 of 2 checkpoints are in use (quota 'checkpoints')" in refused.json()["error"]
        assert "tinkex checkpoint delete" in refused.json()["error"]
        assert save(harness, run_id, 3, path="b", overwrite=True).status_code == 200
        copy = harness.post("/copy_weights", {"source_path": f"tinker://{run_id}/weights/a"})
        assert copy.status_code == 403
        # The number of the rejected request is marked as used: nothing waits for it.
        assert save(harness, run_id, 2, path="c").status_code == 200


def test_storage_quota_counts_unnamed_weights(tmp_path: Path) -> None:
    with open_harness(tmp_path) as harness:
        run_id = create_ready_model(harness, harness.session())
        first = create_checkpoint(harness, run_id, "a")
        create_checkpoint(harness, run_id, ".unnamed", "sampler_weights", is_ephemeral=True)
        used = 2 * first.size_bytes
        harness.write(
            lambda db: quotas.set_overrides(db, harness.tenant_id, {"stored_bytes": used})
        )
        refused = save(harness, run_id, 1, path="b")
        assert refused.status_code == 403
        assert f"{used:,} of {used:,} bytes of checkpoints" in refused.json()["error"]
        harness.write(
            lambda db: quotas.set_overrides(db, harness.tenant_id, {"stored_bytes": used + 1})
        )
        assert save(harness, run_id, 2, path="b").status_code == 200
        copy = harness.post("/copy_weights", {"source_path": str(first.path)})
        assert copy.status_code == 403
        assert f"and this one has {first.size_bytes:,}" in copy.json()["error"]


def test_hourly_token_quota(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_tokens_per_hour=100) as harness:
        session_id = harness.session()
        # More than the remaining quota, but no other request is open.
        assert sample(harness, session_id, 1, max_tokens=200).status_code == 200
        # Open requests count as used.
        waiting = sample(harness, session_id, 2)
        assert waiting.status_code == 429
        assert "your open requests may use" in waiting.json()["error"]
        assert waiting.headers["retry-after"] == "2"
        use_tokens(harness, 100)
        refused = sample(harness, session_id, 3)
        assert refused.status_code == 429
        assert "100 of 100 tokens of this hour are used" in refused.json()["error"]
        assert 0 < int(refused.headers["retry-after"]) <= 3600


def test_tenant_quotas_override_settings(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_models_per_tenant=1, max_tokens_per_hour=7) as harness:
        own = {"models": 0, "checkpoints": 5, "of a later version": 1}
        harness.write(lambda db: quotas.set_overrides(db, harness.tenant_id, own))
        session_id = harness.session()
        for number in range(3):
            create_ready_model(harness, session_id, number)
        reported = harness.send_request("GET", "/usage/quotas").json()["quotas"]
        assert {quota["name"]: (quota["used"], quota.get("limit")) for quota in reported} == {
            "models": (3, None),
            "checkpoints": (0, 5),
            "stored_bytes": (0, None),
            "tokens_per_hour": (0, 7),
            "sessions_per_hour": (1, None),
        }


def test_hourly_session_quota(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_sessions_per_hour=2) as harness:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        first = harness.post("/create_session", body, headers={"X-Idempotency-Key": "one"})
        harness.session()
        refused = harness.post("/create_session", body)
        assert refused.status_code == 429
        assert 0 < float(refused.headers["retry-after"]) <= 3600
        assert refused.json()["error"].startswith(
            "quota exceeded: 2 of 2 sessions of this hour are created (quota 'sessions_per_hour')"
        )
        # A repeated request gets its first response, and other tenants have their own quota.
        again = harness.post("/create_session", body, headers={"X-Idempotency-Key": "one"})
        assert again.json()["session_id"] == first.json()["session_id"]
        harness.session(OTHER_KEY)
        reported = harness.send_request("GET", "/usage/quotas").json()["quotas"]
        assert {"name": "sessions_per_hour", "used": 2, "limit": 2} in reported
        harness.write(
            lambda db: quotas.set_overrides(db, harness.tenant_id, {"sessions_per_hour": 3})
        )
        harness.session()
        assert harness.post("/create_session", body).status_code == 429


def test_session_quota_resets_each_hour(tmp_path: Path) -> None:
    with open_harness(tmp_path, max_sessions_per_hour=1) as harness:
        harness.session()
        harness.write(lambda db: db.execute(sa.update(sessions).values(created_at=0.0)))
        harness.session()
