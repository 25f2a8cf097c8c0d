"""The unmodified official SDK does whole training loops against the stub server.

The SDK runs in a process of its own: it leaves sockets open, which this suite treats as an error.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tinkex.testing import StubServer

KEY, OTHER_KEY = "tml-acceptance", "tml-other"
BASE_MODEL = "tinkex/bigram"
HELLO = list(b"hello hello hello")
Scenario = Callable[[str], Any]
Official = Callable[..., Any]


@pytest.fixture(scope="module")
def official() -> Iterator[Official]:
    """Runs a function of this module, given the server's URL, in the SDK's process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_telemetry) as pool:
        yield lambda scenario, url: pool.submit(scenario, url).result(timeout=120)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer(api_keys={KEY, OTHER_KEY}) as running:
        yield running


def set_telemetry(value: str = "0") -> None:
    os.environ["TINKER_TELEMETRY"] = value


def connect(url: str, **options: Any) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=KEY, **options)


def datum(tokens: list[int], **inputs: Any) -> Any:
    import tinker

    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **given},
    )


def step(client: Any) -> tuple[float, dict[str, float]]:
    import tinker

    passed = client.forward_backward([datum(HELLO)], "cross_entropy")
    moved = client.optim_step(tinker.AdamParams(learning_rate=0.2))
    return passed.result().metrics["loss:sum"], moved.result().metrics


def loss_of(client: Any) -> float:
    loss: float = client.forward([datum(HELLO)], "cross_entropy").result().metrics["loss:sum"]
    return loss


def train_sample_resume(url: str) -> None:
    import tinker

    with connect(url) as service:
        names = [model.model_name for model in service.get_server_capabilities().supported_models]
        assert names == [BASE_MODEL]
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        losses = [step(client)[0] for _ in range(20)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.3 * losses[0], losses
        info = client.get_info()
        assert (info.model_data.model_name, info.lora_rank) == (BASE_MODEL, 8)
        state = client.save_state("step-20").result()
        assert state.path == f"tinker://{client.model_id}/weights/step-20"

        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=16, temperature=0.0)
        prompt = tinker.ModelInput.from_ints(list(b"he"))
        response = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
        first, second = response.sequences
        assert first.tokens == second.tokens
        assert first.sequence_id != second.sequence_id
        assert len(first.logprobs) == len(first.tokens) == 16
        assert first.tokens[0] == ord("l")
        scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(HELLO)).result()
        assert scores[0] is None
        assert math.isclose(-sum(scores[1:]), loss_of(client), rel_tol=1e-4)

        resumed = service.create_training_client_from_state_with_optimizer(state.path)
        assert math.isclose(loss_of(resumed), loss_of(client), rel_tol=1e-6)
        assert step(resumed)[1]["step"] == 21.0
        fresh = service.create_training_client_from_state(state.path)
        assert step(fresh)[1]["step"] == 1.0


def test_training_loop_learns_samples_and_resumes(official: Official, server: StubServer) -> None:
    official(train_sample_resume, server.url)
    assert list(server.finish_reasons.values()) == ["success"]


def train_on_many(url: str) -> None:
    import tinker

    with connect(url) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        data = [datum([index % 256, (index + 1) % 256, 7]) for index in range(1500)]
        output = client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        assert len(output.result().loss_fn_outputs) == 1500
        assert output.result().metrics["tokens:sum"] == 3000.0


def test_many_examples_are_chunked_and_run_in_order(official: Official, server: StubServer) -> None:
    official(train_on_many, server.url)
    passes = [call.message for call in server.calls("forward_backward")]
    sizes = {request.seq_id: len(request.forward_backward_input.data) for request in passes}
    assert sizes == {1: 1024, 2: 476}
    assert [(seq_id, kind) for _, seq_id, kind in server.executed] == [
        (1, "forward_backward"),
        (2, "forward_backward"),
        (3, "optim_step"),
    ]


def train_with_every_loss(url: str) -> None:
    import tinker

    with connect(url) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        forward = client.forward([datum(HELLO)], "cross_entropy").result()
        logprobs = forward.loss_fn_outputs[0]["logprobs"].tolist()
        example = datum(HELLO, logprobs=logprobs, advantages=[1.0] * len(logprobs))
        for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"):
            output = client.forward_backward([example], loss).result()
            assert output.loss_fn_outputs[0]["logprobs"].tolist() == logprobs
            assert math.isfinite(output.metrics["loss:sum"])
        soft = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={
                "target_tokens": [[3, 4], [5, 6]],
                "weights": [[0.5, 0.5], [0.25, 0.75]],
            },
        )
        output = client.forward_backward([soft], "cross_entropy").result()
        assert output.loss_fn_outputs[0]["logprobs"].shape == [2, 2]
        try:
            client.forward_backward([datum(HELLO)], "no_such_loss").result()
        except tinker.UnprocessableEntityError as error:
            assert "no_such_loss" in str(error)
            assert error.body["category"] == "user"
        else:
            raise AssertionError("an unknown loss was accepted")


def test_every_loss_trains_and_unknown_loss_is_a_user_error(
    official: Official, server: StubServer
) -> None:
    official(train_with_every_loss, server.url)


def train_with_custom_loss(url: str) -> None:
    with connect(url) as service:
        client = service.create_lora_training_client(BASE_MODEL)

        def loss(data: Any, logprobs: Any) -> Any:
            return sum((row**2).sum() for row in logprobs), {"examples": len(data)}

        output = client.forward_backward_custom([datum(HELLO)], loss).result()
        assert output.metrics["examples"] == 1
        assert output.metrics["loss:sum"] > 0.0


def test_custom_loss_trains(official: Official, server: StubServer) -> None:
    official(train_with_custom_loss, server.url)
    assert [kind for _, _, kind in server.executed] == ["forward", "forward_backward"]


def sample_with_everything(url: str) -> None:
    import tinker

    with connect(url) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        targets = tinker.TensorData(data=[20, -1, 30, 7, 40, 1], dtype="int64", shape=[3, 2])
        response = sampler.sample(
            tinker.ModelInput.from_ints([10, 20, 30, 40]),
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=3, seed=1, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=targets,
            prompt_alt_tokens_k=5,
            prompt_logprobs_last_n=2,
        ).result()
        assert [score is None for score in response.prompt_logprobs] == [True, True, False, False]
        assert [row is None for row in response.topk_prompt_logprobs] == [True, True, False, False]
        asked = response.target_prompt_logprobs.tolist()
        assert asked[0][1] == 0.0
        assert math.isclose(asked[2][0], response.prompt_logprobs[3])
        assert response.prompt_alt_tokens.tokens.shape == [3, 5]
        assert [len(row) for row in response.sequences[0].topk_logprobs] == [3, 3, 3]
        assert sampler.get_base_model() == BASE_MODEL


def test_sample_supports_every_option(official: Official, server: StubServer) -> None:
    official(sample_with_everything, server.url)


def care_for_checkpoints(url: str) -> None:
    import tinker

    with connect(url, user_metadata={"run": "one"}) as service:
        client = service.create_lora_training_client(BASE_MODEL, user_metadata={"tag": "a"})
        path = client.save_state("first", ttl_seconds=3600).result().path
        sampler_path = client.save_weights_for_sampler("best").result().path
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        runs = rest.list_training_runs().result()
        assert [run.training_run_id for run in runs.training_runs] == [client.model_id]
        assert runs.cursor.total_count == 1
        run = rest.get_training_run(client.model_id).result()
        assert run.user_metadata == {"tag": "a"}
        assert run.last_checkpoint.tinker_path == path
        assert run.last_sampler_checkpoint.tinker_path == sampler_path
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        assert {checkpoint.tinker_path for checkpoint in listed} == {path, sampler_path}
        assert rest.list_user_checkpoints(limit=1).result().cursor.total_count == 2

        other = tinker.RestClient(base_url=url, api_key=OTHER_KEY)
        assert other.list_training_runs().result().training_runs == []
        rest.publish_checkpoint_from_tinker_path(path).result()
        assert other.get_weights_info_by_tinker_path(path).result().base_model == BASE_MODEL
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        rest.delete_checkpoint_from_tinker_path(sampler_path).result()
        [left] = rest.list_user_checkpoints().result().checkpoints
        assert (left.tinker_path, left.public, left.expires_at) == (path, True, None)
        [session_id] = rest.list_sessions().result().sessions
        session = rest.get_session(session_id).result()
        assert session.training_run_ids == [client.model_id]
        assert session.user_metadata == {"run": "one"}
        assert rest.copy_weights(path, "project").result().startswith("tinker://")
        external = client.save_weights_external("export").result().path
        urls = rest.get_external_weights_urls(external).result().urls
        adapter = {"adapter_config.json", "adapter_model.safetensors"}
        assert set(urls) == adapter | {"manifest.json", "tinkex.json"}


def test_runs_checkpoints_and_sessions_are_listed(official: Official, server: StubServer) -> None:
    official(care_for_checkpoints, server.url)


FLAGS = {
    "pjwt_auth_enabled": True,
    "proto_compress_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
}


def take_the_other_roads(url: str) -> None:
    import tinker

    set_telemetry("1")
    with connect(url) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        step(client)
        path = client.save_state("state").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path)
        assert math.isclose(loss_of(resumed), loss_of(client))
        sampler = client.save_weights_and_get_sampling_client()
        prompt = tinker.ModelInput.from_ints([1, 2, 3])
        params = tinker.SamplingParams(max_tokens=4)
        samples = [sampler.sample(prompt, 1, params) for _ in range(20)]
        assert all(len(sample.result().sequences) == 1 for sample in samples)
        clone = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
        assert len(clone.sample(prompt, 1, params).result().sequences) == 1
        who = tinker.RestClient(base_url=url, api_key=KEY).whoami().result()
        assert who.email == "user@example.com"
        try:
            service.create_sampling_client(model_path="tinker://no/weights/such")
        except tinker.NotFoundError:
            pass
        else:
            raise AssertionError("a checkpoint was made up")
    set_telemetry("0")


def test_tokens_compression_completions_and_telemetry(official: Official) -> None:
    with StubServer(client_config=FLAGS, api_keys={KEY}) as server:
        official(take_the_other_roads, server.url)
        [packed, *_] = server.calls("forward_backward")
        assert packed.headers["content-encoding"] == "zstd"
        assert packed.message.seq_id == 1
        [created] = server.calls("create_session")
        assert created.api_key is not None and created.api_key.startswith("eyJ")
        assert len(server.calls("create_model")) == 1, "the second model came with load_weights"
        assert server.calls("retrieve_futures")
        assert server.calls("join_sampling_session")
        assert server.wait_for("telemetry")[0].message["platform"]
