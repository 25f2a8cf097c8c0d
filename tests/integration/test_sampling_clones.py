"""Clones of a sampling client: pickled, or created from a handle."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    KEY,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    eventually,
)
from tinkex import (
    AuthenticationError,
    InvalidInput,
    RetryConfig,
    SamplingClient,
    ServiceClient,
)
from tinkex.testing import Fault, StubServer

BLOCK = 1_000_000_000


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL)


def seq_ids(server: StubServer) -> list[int]:
    return [call.message["seq_id"] for call in server.calls("asample")]


def sample_here(client: SamplingClient) -> str:
    """Runs in another process."""
    return str(client.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences[0].sequence_id)


def sample_handle_here(handle: str, key: str) -> str:
    """Runs in another process."""
    return sample_here(SamplingClient.from_sampler_handle(handle, api_key=key))


def test_pickled_client_works_in_other_processes(serve: Serve, connect: Connect) -> None:
    server = serve(api_keys={KEY})
    service = connect(server)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    handle = sampler.get_sampler_handle()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pickled = pool.submit(sample_here, sampler)
        handed = pool.submit(sample_handle_here, handle, KEY)
        assert pickled.result(TIMEOUT_SECONDS) != handed.result(TIMEOUT_SECONDS)
    numbers = seq_ids(server)
    assert len(set(numbers)) == 3
    assert numbers[0] == 0
    assert all(number >= BLOCK for number in numbers[1:])
    assert len(server.sessions) == 1
    # The other process has ended; this process still finishes the session.
    assert server.finish_reasons == {}
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    service.close().result(TIMEOUT_SECONDS)
    assert list(server.finish_reasons.values()) == ["success"]


def test_handle_contains_no_key(sampler: SamplingClient) -> None:
    handle = sampler.get_sampler_handle()
    assert KEY.encode() not in base64.urlsafe_b64decode(handle)
    assert sampler.sampling_session_id.encode() in base64.urlsafe_b64decode(handle)


def test_handle_is_used_with_readers_key(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(api_keys={KEY})
    handle = connect(server).create_sampling_client(base_model=BASE_MODEL).get_sampler_handle()
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    clone = SamplingClient.from_sampler_handle(handle)
    assert clone.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    stranger = SamplingClient.from_sampler_handle(handle, api_key="tml-stranger")
    with pytest.raises(AuthenticationError):
        stranger.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    clone.holder.close("success").result(TIMEOUT_SECONDS)


@pytest.mark.parametrize("handle", ["", "???", "bm90IGpzb24=", "e30=", "tinker://run/weights/1"])
def test_invalid_handle_is_rejected(handle: str) -> None:
    with pytest.raises(InvalidInput, match="Invalid sampler handle"):
        SamplingClient.from_sampler_handle(handle, api_key=KEY)


def test_pickled_client_keeps_settings(server: StubServer, connect: Connect) -> None:
    service = connect(server, heartbeat_seconds=3.0, event_hook=print)
    retry = RetryConfig(enable_retry_logic=False)
    sampler = service.create_sampling_client(
        base_model=BASE_MODEL, retry_config=retry, record_stability_info=True
    )
    clone: SamplingClient = pickle.loads(pickle.dumps(sampler))
    assert clone.holder.config.heartbeat_seconds == 3.0
    assert clone.holder.config.event_hook is None
    server.inject("asample", Fault(status=500), times=1)
    assert clone.sample(PROMPT, 1, SHORT).exception(TIMEOUT_SECONDS) is not None
    clone.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert server.calls("asample")[-1].message["record_stability_info"] is True
    clone.holder.close("success").result(TIMEOUT_SECONDS)
    assert server.finish_reasons == {}


def test_clones_keep_the_session_alive(server: StubServer, connect: Connect) -> None:
    service = connect(server, heartbeat_seconds=30.0)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    rebuild, (handle, config, retry) = sampler.result().__reduce__()
    clone = rebuild(handle, config.evolve(heartbeat_seconds=0.02), retry)
    clone.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    server.wait_for("session_heartbeat", 2)
    assert len(server.calls("create_session")) == 1
    clone.holder.close("success").result(TIMEOUT_SECONDS)


def test_clone_id_comes_from_server_if_supported(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"sample_join_sampling_session": True})
    service = connect(server)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    for clone in clones:
        futures = [clone.sample(PROMPT, 1, SHORT) for _ in range(5)]
        assert all(future.result(TIMEOUT_SECONDS).sequences for future in futures)
    # A clone joins once, even if many samples start concurrently.
    assert len(server.calls("join_sampling_session")) == 2
    expected = [0, *range(BLOCK, BLOCK + 5), *range(2 * BLOCK, 2 * BLOCK + 5)]
    assert sorted(seq_ids(server)) == expected
    for clone in clones:
        clone.holder.close("success").result(TIMEOUT_SECONDS)


def test_clone_has_separate_batched_poll(serve: Serve, connect: Connect) -> None:
    flags = {"sample_join_sampling_session": True, "sample_use_retrieve_futures": True}
    server = serve(client_config=flags)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    clone = pickle.loads(pickle.dumps(sampler))
    assert clone.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    targets = [call.message["target"] for call in server.calls("retrieve_futures")]
    assert {target["cloned_sampler_id"] for target in targets} == {1}
    clone.holder.close("success").result(TIMEOUT_SECONDS)


def test_finished_session_stops_heartbeats_of_clones(server: StubServer, connect: Connect) -> None:
    """A 410 is not logged as a failure."""
    service = connect(server, heartbeat_seconds=0.02)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    clone = pickle.loads(pickle.dumps(sampler))
    clone.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    server.wait_for("session_heartbeat", 3)
    service.close().result(TIMEOUT_SECONDS)
    counters = clone.holder.transport.metrics.counters
    eventually(lambda: counters["heartbeats_failed"] == 1)
    num_beats = len(server.calls("session_heartbeat"))
    time.sleep(0.1)  # five more would have been sent
    assert counters["heartbeats_failed"] == 1
    assert len(server.calls("session_heartbeat")) == num_beats
    clone.holder.close("success").result(TIMEOUT_SECONDS)
