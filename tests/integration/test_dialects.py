"""Servers of other makes and ages: the same client, the same loop (protocol 13)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    base_logprobs,
    datum,
)
from tinkex import (
    AdamParams,
    APIResponseValidationError,
    APIStatusError,
    BadRequestError,
    ModelInput,
    NotFoundError,
    RequestFailedError,
    SamplingParams,
    ServiceClient,
    TensorData,
)
from tinkex.testing import Fault, StubServer

ADAM = AdamParams(learning_rate=0.3)
DIALECTS = ["skyrl", "tuft"]


@pytest.fixture(params=DIALECTS)
def server(serve: Serve, request: pytest.FixtureRequest) -> StubServer:
    return serve(dialect=request.param, long_poll_seconds=0.05)


def test_training_sampling_and_download_work_in_every_dialect(
    server: StubServer, connect: Connect, tmp_path: Path
) -> None:
    """Train in chunks, step, save, resume, sample and download."""
    with connect(server) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        losses = []
        for _ in range(3):
            passed = client.forward_backward([datum()] * 1100, "cross_entropy")
            client.optim_step(ADAM)
            losses.append(passed.result(TIMEOUT_SECONDS).metrics["loss:sum"])
        assert losses[0] == pytest.approx(-1100 * base_logprobs(HELLO).sum())
        assert losses == sorted(losses, reverse=True)

        path = client.save_state("last").result(TIMEOUT_SECONDS).path
        resumed = service.create_training_client_from_state_with_optimizer(path)
        scores = [
            each.forward([datum()], "cross_entropy")
            .result(TIMEOUT_SECONDS)
            .loss_fn_outputs[0]["logprobs"]
            for each in (client, resumed)
        ]
        np.testing.assert_allclose(scores[0].to_numpy(), scores[1].to_numpy(), rtol=1e-6)

        weights = client.save_weights_for_sampler("last").result(TIMEOUT_SECONDS).path
        named = service.create_sampling_client(model_path=weights)
        unnamed = client.save_weights_and_get_sampling_client()
        for sampler in (named, unnamed):
            greedy = SamplingParams(max_tokens=3, temperature=0.0)
            response = sampler.sample(PROMPT, 2, greedy, include_prompt_logprobs=True)
            sequences = response.result(TIMEOUT_SECONDS).sequences
            assert sequences[0].tokens == sequences[1].tokens
            assert len({sequence.sequence_id for sequence in sequences}) == 2
            logprobs = sampler.compute_logprobs(ModelInput.from_ints(HELLO)).result(TIMEOUT_SECONDS)
            assert logprobs[1:] == pytest.approx(scores[0].tolist(), rel=1e-5)

        folder = tmp_path / "weights"
        rest = service.rest_client()
        assert rest.download_checkpoint(path, folder).result(TIMEOUT_SECONDS) == folder
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] == 4
    assert not list(tmp_path.glob(".weights*"))
    assert server.calls("checkpoint_archive")


def test_skyrl_dialect_receives_json_and_the_old_forward_endpoint(
    serve: Serve, connect: Connect
) -> None:
    server = serve(dialect="skyrl")
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    tried, *rest = server.calls("forward_backward")
    # One batch is enough to find out; from then on everything is JSON.
    assert tried.is_proto
    assert not any(call.is_proto for call in rest)
    assert len(rest) == 2
    assert len(server.calls("forward")) == 1
    assert [number for _, number, _ in server.executed] == [1, 2, 3]


def test_tuft_dialect_receives_protobuf(serve: Serve, connect: Connect) -> None:
    server = serve(dialect="tuft")
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    assert all(call.is_proto for call in server.calls("forward_backward"))
    assert server.calls("forward") == []


def test_dialect_is_detected_by_a_chunked_first_batch(serve: Serve, connect: Connect) -> None:
    server = serve(dialect="skyrl", client_config={"fwdbwd_max_chunk_len": 2})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    rows = [[index, index + 1, index + 2] for index in range(7)]
    output = client.forward_backward([datum(row) for row in rows], "cross_entropy").result(
        TIMEOUT_SECONDS
    )
    got = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    assert got == [pytest.approx(base_logprobs(row).tolist(), rel=1e-5) for row in rows]


def test_sparse_targets_give_the_same_loss_over_json(serve: Serve, connect: Connect) -> None:
    """Soft targets in two dimensions, mostly empty, through a server that knows JSON only."""
    places = {"shape": [3, 40], "sparse_crow_indices": [0, 1, 2, 3]}
    places["sparse_col_indices"] = [5, 0, 39]
    inputs = {
        "target_tokens": TensorData([11, 12, 13], "int64", **places),
        "weights": TensorData([0.5, 0.25, 1.0], "float32", **places),
    }
    losses = []
    for dialect in ("current", "skyrl"):
        client = connect(serve(dialect=dialect)).create_lora_training_client(BASE_MODEL)
        row = datum([1, 2, 3, 4])
        soft = type(row)(model_input=row.model_input, loss_fn_inputs=inputs)
        output = client.forward_backward([soft], "cross_entropy").result(TIMEOUT_SECONDS)
        losses.append(output.metrics["loss:sum"])
        assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 40]
    expected = [base_logprobs(pair)[0] for pair in ([1, 11], [2, 12], [3, 13])]
    assert losses == [pytest.approx(-float(np.dot([0.5, 0.25, 1.0], expected)), rel=1e-6)] * 2


def test_failed_job_raises_in_every_dialect(server: StubServer, connect: Connect) -> None:
    """Some say so by 200, some by 400; nobody is polled for ever."""
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.save_state("one").result(TIMEOUT_SECONDS)
    before = len(server.calls("retrieve_future"))
    with pytest.raises((RequestFailedError, BadRequestError), match="overwrite=True"):
        client.save_state("one").result(TIMEOUT_SECONDS)
    assert len(server.calls("retrieve_future")) <= before + 4
    assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics


def test_slow_job_is_polled_until_done_in_every_dialect(serve: Serve, connect: Connect) -> None:
    for dialect in DIALECTS:
        server = serve(dialect=dialect, work_seconds=0.5, long_poll_seconds=0.05)
        client = connect(server).create_lora_training_client(BASE_MODEL)
        assert client.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics
        assert len(server.calls("retrieve_future")) > 2


def test_missing_endpoints_raise_status_errors(server: StubServer, connect: Connect) -> None:
    rest = connect(server).rest_client()
    with pytest.raises(NotFoundError):
        rest.copy_weights("tinker://run/weights/a").result(TIMEOUT_SECONDS)
    with pytest.raises(APIStatusError):
        rest.set_checkpoint_ttl_from_tinker_path("tinker://run/weights/a", 60).result(
            TIMEOUT_SECONDS
        )


def test_download_of_a_missing_checkpoint_raises_not_found(
    server: StubServer, connect: Connect, tmp_path: Path
) -> None:
    rest = connect(server).rest_client()
    with pytest.raises(NotFoundError):
        rest.download_checkpoint("tinker://run/weights/none", tmp_path / "x").result(
            TIMEOUT_SECONDS
        )
    assert list(tmp_path.iterdir()) == []


def test_archive_reply_without_url_is_a_validation_error(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    server = serve(dialect="tuft")
    service = connect(server)
    path = (
        service.create_lora_training_client(BASE_MODEL).save_state("a").result(TIMEOUT_SECONDS).path
    )
    server.inject("checkpoint_archive", Fault(status=200, body={"nothing": 1}))
    with pytest.raises(APIResponseValidationError, match="checkpoint_archive"):
        service.rest_client().download_checkpoint(path, tmp_path / "x").result(TIMEOUT_SECONDS)


def test_download_retries_while_the_archive_is_built(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    server = serve(dialect="tuft")
    service = connect(server)
    path = (
        service.create_lora_training_client(BASE_MODEL).save_state("a").result(TIMEOUT_SECONDS).path
    )
    building = Fault(status=503, headers={"retry-after-ms": "50"}, body={"detail": "building"})
    server.inject("checkpoint_archive", building, times=2)
    folder = service.rest_client().download_checkpoint(path, tmp_path / "x").result(TIMEOUT_SECONDS)
    assert (folder / "adapter_config.json").exists()
    assert len(server.calls("checkpoint_archive")) == 3


def test_sample_request_to_old_server_has_no_new_fields(
    server: StubServer, service: ServiceClient
) -> None:
    """An unknown field is refused by a strict server of the old schema (protocol 11)."""
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    (call,) = server.calls("asample")
    assert call.message.keys() <= {
        "num_samples",
        "prompt",
        "sampling_params",
        "sampling_session_id",
        "seq_id",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "type",
    }
    assert server.calls("client_dynamic_config") == []
