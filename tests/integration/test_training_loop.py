"""The training loop over HTTP, checked in the client and in the recorded requests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    KEY,
    TIMEOUT_SECONDS,
    Connect,
    Events,
    Serve,
    base_logprobs,
    datum,
)
from tinkex import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    InvalidInput,
    ModelInput,
    ServiceClient,
    TensorData,
    Timing,
)
from tinkex.testing import Call, Fault, StubServer
from tinkex.wire.proto import encode_forward_backward_output

TRAINING = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")
NUM_DATUMS = 2500
CHUNK_SIZES = [1024, 1024, 452]
METRICS = ("a:mean", "b:sum", "c:min", "d:max", "e:slack", "f:unique", "plain")


def varied(count: int) -> list[list[int]]:
    """Token lists that all differ, so that swapped results are detected."""
    return [[index % 256, index // 256, 7, index % 31] for index in range(count)]


def training_calls(server: StubServer) -> list[Call]:
    return [call for call in server.calls() if call.endpoint in TRAINING]


def seq_ids(calls: list[Call]) -> list[int]:
    return [
        call.message.seq_id if call.is_proto else call.message["seq_id"]  # protobuf is typed
        for call in calls
    ]


# --- the loop ---------------------------------------------------------------------------------


def test_chunked_training_loop(server: StubServer, connect: Connect) -> None:
    client = connect(server).create_lora_training_client(BASE_MODEL, rank=8, seed=1)
    rows = varied(NUM_DATUMS)
    passed = client.forward_backward([datum(row, 0.5) for row in rows], "cross_entropy")
    stepped = client.optim_step(AdamParams(learning_rate=0.1))
    saved = client.save_state("step-1")
    sampler = client.save_weights_for_sampler("step-1")

    output = passed.result(TIMEOUT_SECONDS)
    expected = [base_logprobs(row) for row in rows]
    assert len(output.loss_fn_outputs) == NUM_DATUMS
    for got, wanted in zip(output.loss_fn_outputs, expected, strict=True):
        np.testing.assert_allclose(got["logprobs"].to_numpy(), wanted, rtol=1e-5)
    loss = -0.5 * sum(float(row.sum()) for row in expected)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-9)
    assert output.metrics["tokens:sum"] == 3 * NUM_DATUMS
    assert stepped.result(TIMEOUT_SECONDS).metrics["learning_rate"] == 0.1
    assert saved.result(TIMEOUT_SECONDS).path == f"tinker://{client.model_id}/weights/step-1"
    assert (
        sampler.result(TIMEOUT_SECONDS).path == f"tinker://{client.model_id}/sampler_weights/step-1"
    )

    calls = training_calls(server)
    assert seq_ids(calls) == [1, 2, 3, 4, 5, 6]
    assert [call.endpoint for call in calls] == ["forward_backward"] * 3 + list(TRAINING[1:])
    chunks = [call.message.forward_backward_input.data for call in calls[:3]]
    assert [len(chunk) for chunk in chunks] == CHUNK_SIZES
    sent = [row.model_input.to_ints() for chunk in chunks for row in chunk]
    assert sent == [row[:-1] for row in rows]
    assert [number for _, number, _ in server.executed] == [1, 2, 3, 4, 5, 6]


def test_chunk_metrics_are_reduced_by_suffix(server: StubServer, service: ServiceClient) -> None:
    """The server's responses are chosen so that each reduction gives a different number."""
    client = service.create_lora_training_client(BASE_MODEL)
    means, weights = (2.0, 5.0, 11.0), CHUNK_SIZES
    for index, (mean, size) in enumerate(zip(means, weights, strict=True)):
        values = dict.fromkeys(
            ("a:mean", "b:sum", "c:min", "d:max", "e:slack", "f:unique", "plain"), mean
        )
        row = {"logprobs": TensorData.from_numpy(np.full(1, mean, dtype=np.float32))}
        made_up = ForwardBackwardOutput("ArrayRecord", [row] * size, values)
        # Chunks arrive in order, so each gets the future that its result is made up for.
        server.inject("forward_backward", Fault(status=200, body={"request_id": f"chunk-{index}"}))
        server.inject(
            "retrieve_future",
            Fault(
                status=200,
                body=encode_forward_backward_output(made_up),
                headers={"content-type": "application/x-protobuf"},
            ),
            match=lambda call, wanted=f"chunk-{index}": call.message["request_id"] == wanted,
        )
    output = client.forward_backward([datum()] * NUM_DATUMS, "cross_entropy").result(
        TIMEOUT_SECONDS
    )

    mean = float(np.average(means, weights=weights))
    assert output.metrics == pytest.approx(
        {
            "a:mean": mean,
            "b:sum": 18.0,
            "c:min": 2.0,
            "d:max": 11.0,
            "e:slack": 11.0 - mean,
            "f:unique": 2.0,
            "f:unique_2": 5.0,
            "f:unique_3": 11.0,
            "plain": mean,
        }
    )
    firsts = [row["logprobs"].to_numpy()[0] for row in output.loss_fn_outputs]
    assert firsts == [2.0] * 1024 + [5.0] * 1024 + [11.0] * 452


def test_training_reduces_loss(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    losses = []
    for _ in range(8):
        passed = client.forward_backward([datum()], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.3))
        losses.append(passed.result(TIMEOUT_SECONDS).metrics["loss:sum"])
    assert losses[0] == pytest.approx(-base_logprobs(HELLO).sum())
    assert losses[-1] < 0.5 * losses[0]


def test_session_sends_heartbeats_and_is_finished(server: StubServer, connect: Connect) -> None:
    """Session, heartbeats and finish as seen by the server."""
    options = {"project_id": "p-1", "user_metadata": {"team": "red"}, "tags": ("a", "b")}
    with connect(server, heartbeat_seconds=0.02, display_name="loop", **options) as service:
        service.create_lora_training_client(BASE_MODEL)
        server.wait_for("session_heartbeat", 2)
    (session,) = server.sessions.values()
    assert session.project_id == "p-1"
    assert session.user_metadata == {"team": "red"}
    assert session.tags == ["a", "b"]
    assert session.display_name == "loop"
    assert session.sdk_version == "0.36.0"
    assert session.finish_reason == "success"


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError, "errored"), (KeyboardInterrupt, "interrupted")]
)
def test_session_finish_reason_matches_block(
    server: StubServer, connect: Connect, error: type[BaseException], reason: str
) -> None:
    with pytest.raises(error, match="mine"), connect(server) as service:
        service.create_lora_training_client(BASE_MODEL)
        raise error("mine")
    (session,) = server.sessions.values()
    assert session.finish_reason == reason
    # Only the type: the message may contain private data.
    assert session.finish_detail == error.__name__


def test_operation_timings_are_available(server: StubServer, connect: Connect) -> None:
    """Timings are informational, so only their counts are asserted."""
    events = Events()
    service = connect(server, event_hook=events)
    client = service.create_lora_training_client(BASE_MODEL)
    client.forward_backward([datum()] * NUM_DATUMS, "cross_entropy").result(TIMEOUT_SECONDS)
    client.optim_step(AdamParams()).result(TIMEOUT_SECONDS)
    (passed,) = events.wait_for(1, Timing, operation="forward_backward")
    assert (passed.num_requests, passed.ok) == (3, True)
    assert passed.seconds >= passed.submit_seconds > 0.0
    events.wait_for(1, Timing, operation="optim_step")
    assert service.metrics().operations["forward_backward"].count == 1
    assert service.metrics().operations["optim_step"].failed == 0


# --- chunking ---------------------------------------------------------------------------------


def test_chunks_are_split_by_bytes(serve: Serve, connect: Connect) -> None:
    """A token of a datum takes 4 + 8 + 4 bytes: input, target, weight."""
    server = serve(client_config={"fwdbwd_max_chunk_bytes_count": 160})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    lengths = [4, 6, 1, 30, 10, 1]
    rows = [datum([1] * (length + 1)) for length in lengths]
    output = client.forward_backward(rows, "cross_entropy").result(TIMEOUT_SECONDS)
    calls = server.calls("forward_backward")
    sent = [
        [len(row.model_input.to_ints()) for row in call.message.forward_backward_input.data]
        for call in calls
    ]
    # The oversized datum gets its own chunk, and no chunk is empty.
    assert sent == [[4, 6], [1], [30], [10], [1]]
    assert seq_ids(calls) == [1, 2, 3, 4, 5]
    assert [row["logprobs"].shape for row in output.loss_fn_outputs] == [[n] for n in lengths]


def test_server_sets_chunk_length(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"fwdbwd_max_chunk_len": 10})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward([datum()] * 25, "cross_entropy").result(TIMEOUT_SECONDS)
    calls = server.calls("forward_backward")
    assert [len(call.message.forward_backward_input.data) for call in calls] == [10, 10, 5]
    assert all(call.forward_only for call in calls)


@pytest.mark.parametrize("flags", [{}, {"parallel_fwdbwd_chunks": True}])
def test_operations_do_not_interleave_with_chunks(
    serve: Serve, connect: Connect, flags: dict[str, Any]
) -> None:
    """Concurrent or sequential, a call's chunks are sent before the next operation."""
    server = serve(client_config={"fwdbwd_max_chunk_len": 2, **flags})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    slow = Fault(delay_seconds=0.05)
    server.inject("forward_backward", slow, times=3)
    futures = []
    for _ in range(3):
        futures.append(client.forward_backward([datum()] * 10, "cross_entropy"))
        futures.append(client.optim_step(AdamParams()))
    for future in futures:
        future.result(TIMEOUT_SECONDS)
    calls = training_calls(server)
    groups = [list(group) for _, group in itertools.groupby(calls, lambda call: call.endpoint)]
    assert [len(group) for group in groups] == [5, 1] * 3
    assert [sorted(seq_ids(group)) for group in groups[::2]] == [
        [1, 2, 3, 4, 5],
        [7, 8, 9, 10, 11],
        [13, 14, 15, 16, 17],
    ]
    if not flags:
        assert seq_ids(calls) == list(range(1, 19))
    assert [number for _, number, _ in server.executed] == list(range(1, 19))


def test_invalid_data_is_rejected_before_sending(
    server: StubServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    with pytest.raises(InvalidInput, match="No data"):
        client.forward_backward([], "cross_entropy")
    with pytest.raises(InvalidInput, match="dict"):
        client.forward_backward([{"tokens": [1]}], "cross_entropy")  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="learning_rate"):
        client.optim_step(AdamParams(learning_rate=float("inf")))
    with pytest.raises(InvalidInput, match="name"):
        client.save_state("a/b")
    client.optim_step(AdamParams()).result(TIMEOUT_SECONDS)
    # A rejected call uses no seq id.
    assert seq_ids(training_calls(server)) == [1]


# --- requests ---------------------------------------------------------------------------------


def test_headers_of_a_request_and_its_polls(serve: Serve, connect: Connect) -> None:
    server = serve(long_poll_seconds=0.02, work_seconds=0.5)
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    (sent,) = server.calls("forward_backward")
    assert sent.headers["content-type"] == "application/x-protobuf"
    assert sent.headers["x-api-key"] == KEY
    assert sent.headers["x-idempotency-key"]
    polls = [
        call
        for call in server.calls("retrieve_future")
        if call.headers["x-tinker-request-type"] == "Forward"
    ]
    assert len(polls) > 1
    assert [call.headers["x-tinker-request-iteration"] for call in polls] == [
        str(number) for number in range(len(polls))
    ]
    assert all(call.headers["accept"] == "application/x-protobuf" for call in polls)
    round_trip_times = [
        call.headers.get("x-tinker-create-promise-roundtrip-time") for call in polls
    ]
    # The official client always reports about 0 here for samples.
    assert float(round_trip_times[0] or 0) > 0.0
    assert round_trip_times[1:] == [None] * (len(polls) - 1)


def test_adapters_of_one_session_are_independent(
    server: StubServer, service: ServiceClient
) -> None:
    first = service.create_lora_training_client(BASE_MODEL)
    second = service.create_lora_training_client(BASE_MODEL)
    first.forward_backward([datum()], "cross_entropy")
    first.optim_step(AdamParams(learning_rate=1.0)).result(TIMEOUT_SECONDS)
    untouched = second.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    assert untouched.metrics["loss:sum"] == pytest.approx(-base_logprobs(HELLO).sum())
    assert (first.model_seq_id, second.model_seq_id) == (0, 1)
    assert seq_ids(training_calls(server)) == [1, 2, 1]
    assert len(server.calls("create_session")) == 1


# --- resuming from a checkpoint ---------------------------------------------------------------


@pytest.mark.parametrize("flag", [False, True])
def test_training_resumes_from_saved_state(serve: Serve, connect: Connect, flag: bool) -> None:
    server = serve(client_config={"create_model_via_load_weights": flag})
    service = connect(server)
    client = service.create_lora_training_client(BASE_MODEL, rank=4)

    def train(trained: Any) -> float:
        passed = trained.forward_backward([datum()], "cross_entropy")
        trained.optim_step(AdamParams(learning_rate=0.2)).result(TIMEOUT_SECONDS)
        loss: float = passed.result(TIMEOUT_SECONDS).metrics["loss:sum"]
        return loss

    train(client)
    path = client.save_state("half").result(TIMEOUT_SECONDS).path
    exact = service.create_training_client_from_state_with_optimizer(path)
    fresh = service.create_training_client_from_state(path)
    expected = [train(client), train(client)]
    assert [train(exact), train(exact)] == pytest.approx(expected, rel=1e-9)
    first, second = train(fresh), train(fresh)
    assert first == pytest.approx(expected[0], rel=1e-9)
    assert second != pytest.approx(expected[1], rel=1e-9)  # with a new optimizer
    assert len(server.calls("create_model")) == (1 if flag else 3)
    # Loading uses the first seq id of a new model.
    loads = [call.message.get("seq_id") for call in server.calls("load_weights")]
    assert loads == ([None, None] if flag else [1, 1])


def test_load_state_replaces_weights(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    start = client.save_state("start").result(TIMEOUT_SECONDS).path
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1.0))
    moved = client.forward([datum()], "cross_entropy")
    with pytest.warns(FutureWarning, match="create_training_client_from_state"):
        client.load_state(start)
    back = client.forward([datum()], "cross_entropy")
    loss = -float(base_logprobs(HELLO).sum())
    assert moved.result(TIMEOUT_SECONDS).metrics["loss:sum"] < 0.9 * loss
    assert back.result(TIMEOUT_SECONDS).metrics["loss:sum"] == pytest.approx(loss)


def test_data_can_change_after_call(service: ServiceClient) -> None:
    """The data at the time of the call is sent, not at the time of sending."""
    client = service.create_lora_training_client(BASE_MODEL)
    weights = np.ones(len(HELLO) - 1, dtype=np.float32)
    row = Datum(
        model_input=ModelInput.from_ints(HELLO[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData.from_numpy(np.array(HELLO[1:])),
            "weights": TensorData.from_numpy(weights),
        },
    )
    rows = [row]
    passed = client.forward([*rows], "cross_entropy")
    weights[:] = 0.0
    rows.clear()
    assert passed.result(TIMEOUT_SECONDS).metrics["loss:sum"] == pytest.approx(
        -base_logprobs(HELLO).sum()
    )


def test_traced_loss_runs_on_the_server_or_else_in_the_client(
    server: StubServer, connect: Connect
) -> None:
    torch = pytest.importorskip("torch")

    def simple(logprobs: Any, weights: Any) -> Any:
        loss = (logprobs.square() * weights).sum()
        return loss, {"custom/mean:mean": logprobs.mean()}

    def unknown(logprobs: Any, weights: Any) -> Any:
        # The same loss, with an operation that the server does not have.
        loss = torch.einsum("i,i->", logprobs.square(), weights)
        return loss, {"custom/mean:mean": logprobs.mean()}

    service = connect(server)
    outputs, steps = [], []
    for fn in (simple, unknown):
        handle = service.create_custom_loss(fn, {"logprobs": 1, "weights": 1}).result()
        assert (handle.loss_id is not None) == (fn is simple)
        client = service.create_lora_training_client(BASE_MODEL)
        outputs.append(client.forward_backward_custom([datum([1, 2, 3])], handle).result().metrics)
        steps.append(client.optim_step(AdamParams(learning_rate=0.1)).result().metrics)
    for name in ("loss:sum", "custom/mean:mean"):
        assert outputs[0][name] == pytest.approx(outputs[1][name], rel=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)
    # One pass on the server, or two with the loss between them.
    kinds = [kind for _, _, kind in server.executed if kind.startswith("forward")]
    assert kinds == ["forward_backward", "forward", "forward_backward"]
