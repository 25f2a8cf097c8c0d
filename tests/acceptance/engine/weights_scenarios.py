"""Resuming from checkpoints, and using downloaded weights elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.acceptance.engine.scenario_context import (
    ScenarioContext,
    connect,
    error_text,
    example,
    fetch_adapter,
    logprobs_of,
    max_difference,
    prompt_of,
    step,
    text,
    weights_of,
)

MODELS = ("tiny", "other")


def examples(number: int, size: int = 3) -> list[Any]:
    """A small batch that depends on `number`."""
    return [example(text(10 * number + index, 4), text(99 - index, 9)) for index in range(size)]


def train(client: Any, first: int = 0, num_steps: int = 3) -> list[Any]:
    """Train some steps; returns all metrics."""
    return [step(client, examples(number)) for number in range(first, first + num_steps)]


def resume_from_checkpoint(context: ScenarioContext) -> None:
    """Resuming with the optimizer is bit-identical; without it, the optimizer is reset."""
    with connect(context) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=1)
        train(client)
        path = client.save_state("third").result().path
        ahead = train(client, 3)
        adapter = fetch_adapter(context, client, "straight")

        resumed = service.create_training_client_from_state_with_optimizer(path)
        assert train(resumed, 3) == ahead
        assert fetch_adapter(context, resumed, "resumed") == adapter

        fresh = service.create_training_client_from_state(path)
        (metrics,) = train(fresh, 3, 1)
        assert metrics[0] == ahead[0][0], "the weights are the same"
        assert (metrics[1]["step"], ahead[0][1]["step"]) == (1.0, 4.0)
        train(fresh, 4, 2)
        other = weights_of(fetch_adapter(context, fresh, "f"))
        assert max_difference(other, weights_of(adapter)) > 1e-4

        with _deprecated():
            client.load_state_with_optimizer(path).result()
            assert train(client, 3) == ahead
            client.load_state(path).result()
        assert train(client, 3, 1) == [metrics]


def reject_mismatched_checkpoint(context: ScenarioContext) -> None:
    """The error names both ranks, or both models; the client can continue."""
    with connect(context) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=1)
        train(client)
        path = client.save_state("eight").result().path
        small = service.create_lora_training_client("tiny", rank=4, seed=1)
        elsewhere = service.create_lora_training_client("other", rank=8, seed=1)
        (before,) = train(small, 0, 1)
        with _deprecated():
            message = error_text(lambda: small.load_state_with_optimizer(path).result())
            assert "rank 8" in message and "has 4" in message, message
            message = error_text(lambda: elsewhere.load_state(path).result())
            assert "'tiny'" in message and "'other'" in message, message
        other = service.create_lora_training_client("tiny", rank=4, seed=1)
        assert train(other, 0, 1) == [before]
        assert train(other, 1) == train(small, 1)


class _deprecated(warnings.catch_warnings):
    """Ignores the SDK's warning about loading into an existing model."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)


# --- trainer, sampler and PEFT -------------------------------------------------------------------

TOLERANCE = 1e-4
TEMPERATURES = (0.5, 1.0, 1.5)


def compare_trainer_and_sampler(context: ScenarioContext) -> None:
    """The sampler's and the trainer's log-probabilities of 1,000 tokens agree."""
    with connect(context) as service:
        client = service.create_lora_training_client("tiny", rank=8, seed=1)
        train(client, 0, 6)
        sampler = client.save_weights_and_get_sampling_client()
        for temperature in TEMPERATURES:
            assert _max_logprob_difference(client, sampler, temperature) <= TOLERANCE
        asked = [example(text(seed, 1), text(50 + seed, 40)) for seed in range(4)]
        for datum, mine in zip(asked, logprobs_of(client, asked), strict=True):
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
            tokens = [*datum.model_input.to_ints()[:1], *targets]
            first, *theirs = sampler.compute_logprobs(prompt_of(tokens)).result()
            assert first is None
            assert np.abs(np.array(theirs) - mine).max() <= TOLERANCE


def _max_logprob_difference(client: Any, sampler: Any, temperature: float) -> float:
    import tinker

    params = tinker.SamplingParams(max_tokens=64, temperature=temperature, seed=3, stop=[])
    prompts = [text(seed, 5) for seed in (1, 2)]
    drawn = [sampler.sample(prompt_of(prompt), 8, params) for prompt in prompts]
    gaps = []
    for prompt, each in zip(prompts, drawn, strict=True):
        for one in each.result().sequences:
            logprobs = _logprobs_at_temperature(client, [*prompt, *one.tokens], temperature)
            expected = logprobs[len(prompt) - 1 :][np.arange(64), one.tokens]
            gaps.append(np.abs(np.array(one.logprobs) - expected))
    assert sum(map(len, gaps)) >= 1000
    return float(np.max(gaps))


def _logprobs_at_temperature(client: Any, tokens: list[int], temperature: float) -> Any:
    """The trainer's distribution at each position but the last, with every token as a target."""
    import tinker

    num_rows, num_tokens = len(tokens) - 1, 259
    shape = [num_rows, num_tokens]
    targets = np.tile(np.arange(num_tokens), (num_rows, 1))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=shape),
            "weights": tinker.TensorData(data=np.zeros(shape), dtype="float32", shape=shape),
        },
    )
    (logprobs,) = logprobs_of(client, [datum])
    scaled = logprobs.astype(np.float64) / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))


def compare_with_peft(context: ScenarioContext, base_model: str) -> None:
    """A downloaded adapter gives the same results in transformers with PEFT."""
    with connect(context) as service:
        client = service.create_lora_training_client(base_model, rank=6, seed=1)
        train(client, 0, 6)
        files = fetch_adapter(context, client, "peft")
        data = examples(50)
        mine = logprobs_of(client, data)
    score = _load_with_peft(context, base_model, files)
    for datum, logprobs in zip(data, mine, strict=True):
        assert np.abs(score(datum) - logprobs).max() <= TOLERANCE


def _load_with_peft(
    context: ScenarioContext, base_model: str, files: dict[str, bytes]
) -> Callable[[Any], np.ndarray]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = context.directory / "adapter"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(context.folders[base_model], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder).eval()

    def score(datum: Any) -> np.ndarray:
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        with torch.no_grad():
            logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        found: np.ndarray = logits.log_softmax(-1).gather(1, targets.unsqueeze(1))[:, 0].numpy()
        return found

    return score
