"""Scenarios of the official TrainingClient: losses, gradients, optimizers, chunks."""

from __future__ import annotations

import asyncio
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.acceptance.server.scenario_context import (
    BASE_MODEL,
    HELLO,
    ScenarioContext,
    base_logprobs,
    datum,
    loss_of,
    step,
)


def connect(place: ScenarioContext, **options: Any) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=place.url, api_key=place.key, **options)


def learn(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        [model] = service.get_server_capabilities().supported_models
        assert model.model_name == BASE_MODEL
        assert model.max_context_length and model.trainable and model.sampleable
        client = service.create_lora_training_client(
            BASE_MODEL, rank=8, seed=1, user_metadata={"purpose": "learn"}
        )
        session_id = service.holder.get_session_id()
        assert client.model_id == f"{session_id}:train:0"
        assert session_id in service.get_console_url()
        assert client.model_id in client.get_console_url()
        assert service.get_telemetry() is not None
        assert client.get_telemetry() is not None

        output = client.forward([datum(tinker, HELLO)], "cross_entropy").result()
        [row] = output.loss_fn_outputs
        assert row["logprobs"].shape == [len(HELLO) - 1]
        assert row["logprobs"].dtype == "float32"
        assert np.allclose(row["logprobs"].to_numpy(), base_logprobs(HELLO), atol=1e-6)

        steps = [step(tinker, client) for _ in range(10)]
        losses = [loss for loss, _ in steps]
        assert math.isclose(losses[0], -base_logprobs(HELLO).sum(), rel_tol=1e-6)
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.5 * losses[0], losses
        assert [metrics["step"] for _, metrics in steps] == [*range(1, 11)]
        assert all(metrics["grad_norm"] > 0 for _, metrics in steps)

        info = client.get_info()
        assert info.model_data.model_name == BASE_MODEL
        assert (info.is_lora, info.lora_rank, info.model_id) == (True, 8, client.model_id)
        second = service.create_lora_training_client(BASE_MODEL, rank=4)
        assert second.model_id == f"{session_id}:train:1"
        assert math.isclose(loss_of(tinker, second), losses[0], rel_tol=1e-6), (
            "models are strangers"
        )


def learn_async(place: ScenarioContext) -> None:
    asyncio.run(_learn_async(place))


async def _learn_async(place: ScenarioContext) -> None:
    import tinker

    service = connect(place)
    capabilities = await service.get_server_capabilities_async()
    assert [model.model_name for model in capabilities.supported_models] == [BASE_MODEL]
    client = await service.create_lora_training_client_async(BASE_MODEL, rank=8)
    losses = []
    for _ in range(5):
        passed = await client.forward_backward_async([datum(tinker, HELLO)], "cross_entropy")
        moved = await client.optim_step_async(tinker.AdamParams(learning_rate=0.2))
        losses.append((await passed).metrics["loss:sum"])
        assert (await moved.result_async()).metrics["step"] == len(losses)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    output = await (await client.forward_async([datum(tinker, HELLO)], "cross_entropy"))
    assert output.metrics["loss:sum"] < losses[-1]
    assert (await client.get_info_async()).lora_rank == 8
    await service.close("success", detail="all is well")


def gather_gradients(place: ScenarioContext) -> None:
    """Gradients of two passes accumulate; a forward pass has no effect."""
    import tinker

    other = list(b"world world")
    with connect(place) as service:
        apart, together, silent = (
            service.create_lora_training_client(BASE_MODEL, rank=8) for _ in range(3)
        )
        apart.forward_backward([datum(tinker, HELLO)], "cross_entropy").result()
        apart.forward_backward([datum(tinker, other)], "cross_entropy").result()
        both = [datum(tinker, HELLO), datum(tinker, other)]
        together.forward_backward(both, "cross_entropy").result()
        silent.forward(both, "cross_entropy").result()
        adam = tinker.AdamParams(learning_rate=0.1, grad_clip_norm=1.0)
        norms = [
            client.optim_step(adam).result().metrics["grad_norm"] for client in (apart, together)
        ]
        assert math.isclose(*norms, rel_tol=1e-9)
        assert math.isclose(loss_of(tinker, apart), loss_of(tinker, together), rel_tol=1e-6)
        assert silent.optim_step(adam_params=adam).result().metrics["grad_norm"] == 0.0
        assert math.isclose(loss_of(tinker, silent), -base_logprobs(HELLO).sum(), rel_tol=1e-6)


def send_many_examples(place: ScenarioContext) -> None:
    """Results of batches sent in several chunks are complete and in order."""
    import tinker

    texts = [[index, index + 1, 2 * index, 7] for index in range(30)]
    with connect(place) as service:
        assert service.holder.get_client_config().fwdbwd_max_chunk_len == 4
        chunked = service.create_lora_training_client(BASE_MODEL, rank=8)
        passed = chunked.forward_backward([datum(tinker, text) for text in texts], "cross_entropy")
        adam = tinker.AdamParams(learning_rate=0.1)
        moved = chunked.optim_step(adam)
        output = passed.result()
        assert output.metrics["tokens:sum"] == 90.0
        for text, row in zip(texts, output.loss_fn_outputs, strict=True):
            assert np.allclose(row["logprobs"].to_numpy(), base_logprobs(text), atol=1e-6)
        total = sum(base_logprobs(text).sum() for text in texts)
        assert math.isclose(output.metrics["loss:sum"], -total, rel_tol=1e-6)

        single = service.create_lora_training_client(BASE_MODEL, rank=8)
        for text in texts:
            single.forward_backward([datum(tinker, text)], "cross_entropy")
        norms = [moved.result().metrics["grad_norm"], single.optim_step(adam).result().metrics]
        assert math.isclose(norms[0], norms[1]["grad_norm"], rel_tol=1e-6)
        assert math.isclose(loss_of(tinker, chunked), loss_of(tinker, single), rel_tol=1e-6)


def use_every_loss(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        logprobs = base_logprobs(HELLO).astype(np.float32).tolist()
        example = datum(tinker, HELLO, logprobs=logprobs, advantages=[0.5] * len(logprobs))
        config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        # All ratios are 1 here, so each loss is minus the sum of the advantages.
        for loss, options in (("importance_sampling", None), ("ppo", config), ("gspo", config)):
            output = client.forward_backward([example], loss, options).result()
            assert math.isclose(output.metrics["loss:sum"], -0.5 * len(logprobs), rel_tol=1e-5)
        for loss in ("cispo", "dro"):
            output = client.forward_backward([example], loss).result()
            assert math.isclose(output.metrics["loss:sum"], -0.5 * sum(logprobs), rel_tol=1e-5)
        soft = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={
                "target_tokens": [[3, 4], [5, 6]],
                "weights": [[0.5, 0.5], [0.25, 0.75]],
            },
        )
        output = client.forward_backward([soft], "cross_entropy").result()
        assert output.loss_fn_outputs[0]["logprobs"].shape == [2, 2]
        _refuse(client, "no_such_loss", datum(tinker, HELLO), "no_such_loss")
        _refuse(client, "ppo", datum(tinker, HELLO), "logprobs")
        _refuse(client, "cross_entropy", datum(tinker, [1, 99_999]), "99999")


def _refuse(client: Any, loss: str, example: Any, word: str) -> None:
    """An invalid request is rejected before it is queued and has no side effects."""
    import tinker

    try:
        client.forward_backward([example], loss).result()
    except tinker.UnprocessableEntityError as error:
        assert word in str(error), error
        assert error.body["category"] == "user"
    else:
        raise AssertionError(f"{loss} took {example}")


def square(data: Any, logprobs: Any) -> Any:
    """A client-side loss: the sum of squares."""
    return sum((row**2).sum() for row in logprobs), {"examples:sum": len(data)}


def weighed(logprobs: Any, weights: Any) -> Any:
    """A loss that is traced."""
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighed:sum": loss}


def use_custom_losses(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        plain = service.create_lora_training_client(BASE_MODEL)
        output = plain.forward_backward_custom([datum(tinker, HELLO)], square).result()
        expected = float((base_logprobs(HELLO) ** 2).sum())
        assert math.isclose(output.metrics["loss:sum"], expected, rel_tol=1e-5)
        assert output.metrics["examples:sum"] == 1

        ranks = {"logprobs": 1, "weights": 1}
        handle = service.create_custom_loss(weighed, input_ranks=ranks).result()
        assert handle.loss_id.startswith("loss1-"), handle
        traced = service.create_lora_training_client(BASE_MODEL)
        output = traced.forward_backward_custom([datum(tinker, HELLO)], handle).result()
        assert math.isclose(output.metrics["custom/weighed:sum"], output.metrics["loss:sum"])
        entropy = service.create_lora_training_client(BASE_MODEL)
        same = entropy.forward_backward([datum(tinker, HELLO)], "cross_entropy").result()
        assert math.isclose(output.metrics["loss:sum"], same.metrics["loss:sum"], rel_tol=1e-5)
        adam = tinker.AdamParams(learning_rate=0.1)
        norms = [
            client.optim_step(adam).result().metrics["grad_norm"] for client in (traced, entropy)
        ]
        assert math.isclose(*norms, rel_tol=1e-5)
        asyncio.run(_use_custom_loss_async(plain))


async def _use_custom_loss_async(client: Any) -> None:
    import tinker

    passed = await client.forward_backward_custom_async([datum(tinker, HELLO)], square)
    assert (await passed).metrics["loss:sum"] > 0


def choose_an_optimizer(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        client = service.create_lora_training_client(
            BASE_MODEL, optimizer=tinker.DimuonOptimizerConfig()
        )
        before = loss_of(tinker, client)
        client.forward_backward([datum(tinker, HELLO)], "cross_entropy").result()
        client.optim_step(tinker.DimuonParams(learning_rate=0.1)).result()
        assert loss_of(tinker, client) < before
        try:
            client.optim_step(tinker.AdamParams()).result()
        except tinker.UnprocessableEntityError as error:
            assert "dimuon" in str(error)
        else:
            raise AssertionError("a step of another optimizer was taken")
        assert client.get_info().optimizer_config.type == "dimuon"


def load_tokenizers(place: ScenarioContext) -> None:
    """The SDK loads a tokenizer by the server's tokenizer id; here that is a folder."""
    import tinker

    write_tokenizer(Path(BASE_MODEL))
    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        assert client.get_tokenizer().encode("a b") == [1, 2]
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        assert sampler.get_tokenizer().encode("b a") == [2, 1]
        assert isinstance(sampler, tinker.SamplingClient)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of two words, as files that transformers loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def end_a_session(place: ScenarioContext) -> None:
    """A finished session rejects operations and keeps its first reason."""
    import tinker

    service = connect(place)
    client = service.create_lora_training_client(BASE_MODEL)
    service.close("interrupted", detail="enough").result()
    late = connect(place)
    late.create_lora_training_client(BASE_MODEL)
    session_id = client.model_id.partition(":")[0]
    request = tinker.types.SessionSearchRequest(session_id=session_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tinker.ExperimentalWarning)
        [session] = _rest(place).search_sessions(request).result().sessions
    assert session.status.type == "client_finished"
    assert (session.status.reason.type, session.status.detail) == ("interrupted", "enough")
    late.close("errored").result()


def _rest(place: ScenarioContext) -> Any:
    import tinker

    return tinker.RestClient(base_url=place.url, api_key=place.key)


SCENARIOS = (
    learn,
    learn_async,
    gather_gradients,
    send_many_examples,
    use_every_loss,
    use_custom_losses,
    choose_an_optimizer,
    load_tokenizers,
    end_a_session,
)
