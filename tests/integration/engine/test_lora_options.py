"""Alpha, rsLoRA and target modules hold in training, sampling, files, merging and recovery."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.engine.conftest import MakeEngine
from tests.support.adapters import load_peft, load_plain
from tests.support.engine_calls import NAME, datum, forward_backward, spec, step, weights
from tests.support.sampling_runner import inference_request
from tinkex.engine.checkpoints.merge import merge_adapter
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.errors import InvalidInput
from tinkex.types import Datum, ModelInput, SampleResponse

TOKENS = [5, 17, 61, 3, 3, 42, 9, 61, 28, 7, 23]
OPTIONS = [
    {"alpha": 7.5},
    {"use_rslora": True},
    {"alpha": 4.0, "use_rslora": True, "target_modules": ("q_proj", "v_proj", "down_proj")},
    {"target_modules": ("layers.1.self_attn.k_proj", "lm_head")},
    {"target_modules": ("o_proj", "up_proj"), "optimizer": {"type": "dimuon"}},
]


def train(engine: TorchEngine, first: int = 0) -> list[Any]:
    """Train three steps; returns all metrics."""
    results = []
    for number in range(first, first + 3):
        output = forward_backward(engine, "a", datum(number), datum(number + 10, 7))
        results.append((dict(output.metrics), step(engine, "a")))
    return results


def training_logprobs(engine: TorchEngine) -> np.ndarray:
    """The log-probabilities of the tokens by a forward pass of the adapter."""
    one = Datum(
        model_input=ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:])},
    )
    output = forward_backward(engine, "a", one, forward_only=True)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def sample(engine: TorchEngine, directory: Path) -> SampleResponse:
    """Decode a few tokens with a checkpoint, and score the prompt."""
    request = inference_request(TOKENS, prompt_logprobs=True, seed=1)
    engine.start_sample("job", SamplerSource(base_model=NAME, directory=directory), request)
    finished = [each for _ in range(100) for each in engine.step_samples()]
    outcome = finished[0].outcome
    assert isinstance(outcome, SampleResponse), outcome
    return outcome


@torch.no_grad()
def model_logprobs(model: torch.nn.Module, tokens: list[int] = TOKENS) -> np.ndarray:
    """The log-probabilities of tokens by transformers or PEFT."""
    logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    rows = logits.float().log_softmax(-1)
    return rows[torch.arange(len(rows)), tokens[1:]].numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_path_computes_the_same(
    engine: TorchEngine, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine.create("a", spec(**options))
    base = training_logprobs(engine)
    train(engine)
    expected = training_logprobs(engine)
    assert np.abs(expected - base).max() > 0.01
    saved = tmp_path / "saved"
    saved.mkdir()
    engine.save("a", saved, with_optimizer=False)
    adapted = load_peft(AutoModelForCausalLM.from_pretrained(folder).eval(), saved)
    assert np.allclose(model_logprobs(adapted), expected, atol=1e-4)
    response = sample(engine, saved)
    assert response.prompt_logprobs is not None
    assert np.allclose(np.array(response.prompt_logprobs[1:], float), expected, atol=1e-4)
    sequence = response.sequences[0]
    decoded = model_logprobs(adapted, TOKENS + sequence.tokens)[len(TOKENS) - 1 :]
    assert np.allclose(sequence.logprobs, decoded, atol=1e-4), "by the fused decode kernel"
    merge_adapter(folder, saved, tmp_path / "merged")
    assert np.allclose(model_logprobs(load_plain(tmp_path / "merged")), expected, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_continues_identically(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]
) -> None:
    first, second, third = make_engine(), make_engine(), make_engine()
    first.create("a", spec(**options))
    train(first)
    for name in ("saved", "snapshot"):
        (tmp_path / name).mkdir()
    first.save("a", tmp_path / "saved", with_optimizer=True)
    second.create("a", spec(**options))
    second.load("a", tmp_path / "saved", with_optimizer=True)
    forward_backward(first, "a", datum(50))
    forward_backward(second, "a", datum(50))
    first.snapshot("a")(tmp_path / "snapshot")
    third.restore("a", spec(**options), tmp_path / "snapshot")
    results = train(first, 3)
    assert train(second, 3) == results
    assert train(third, 3) == results
    assert torch.equal(weights(second, "a"), weights(first, "a"))
    assert torch.equal(weights(third, "a"), weights(first, "a"))


def test_config_file_has_the_options(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create("a", spec(alpha=16.0, use_rslora=True, target_modules=("q_proj", "down_proj")))
    engine.save("a", tmp_path, with_optimizer=False)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"]) == (16, True)
    modules = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert modules == {"q_proj", "down_proj"}
    # Versions that do not know the options must not read the weights.
    assert json.loads((tmp_path / "tinkex.json").read_text())["format"] == 2


@pytest.mark.parametrize("kind", ["adamw", "dimuon"])
def test_other_members_of_a_merged_layer_stay_zero(engine: TorchEngine, kind: str) -> None:
    engine.create("a", spec(target_modules=("q_proj",), optimizer={"type": kind}))
    train(engine)
    adapter = engine._adapters["a"]
    flat = adapter.state.weights
    trained = sum(pair.down.count_nonzero() for pair in adapter.layout.pairs(flat))
    trained += sum(pair.up.count_nonzero() for pair in adapter.layout.pairs(flat))
    assert flat.count_nonzero() == trained > 0


def test_selected_modules_start_with_the_same_weights(engine: TorchEngine) -> None:
    kinds = {"train_mlp": False, "train_unembed": False}
    engine.create("all", spec(**kinds))
    engine.create("some", spec(**kinds, target_modules=("q_proj", "o_proj")))
    initial = {
        pair.path: pair.down
        for pair in engine._adapters["all"].layout.pairs(weights(engine, "all"))
    }
    for pair in engine._adapters["some"].layout.pairs(weights(engine, "some")):
        assert torch.equal(pair.down, initial[pair.path])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": ("query",)}, "'query' is not .* are: down_proj, gate_proj, k_proj"),
        ({"target_modules": ("q_proj",), "train_attn": False}, "'q_proj' is not in the trained"),
        ({"alpha": 0.0}, "alpha is 0.0, expected a number above 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
    ],
)
def test_impossible_options_are_refused_at_creation(
    engine: TorchEngine, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        engine.create("a", spec(**options))
    assert not engine.has_adapter("a")


def test_checkpoint_of_another_scale_is_rescaled(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create("a", spec(alpha=64.0))
    train(engine)
    expected = training_logprobs(engine)
    engine.save("a", tmp_path, with_optimizer=True)
    engine.create("a", spec(use_rslora=True))
    engine.load("a", tmp_path, with_optimizer=False)
    assert np.allclose(training_logprobs(engine), expected, atol=1e-4)
    with pytest.raises(InvalidInput, match="alpha 64 and use_rslora False, but the adapter has 32"):
        engine.load("a", tmp_path, with_optimizer=True)


def test_checkpoint_of_other_modules_is_refused(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create("a", spec(target_modules=("q_proj",)))
    engine.save("a", tmp_path, with_optimizer=False)
    engine.create("b", spec())
    with pytest.raises(InvalidInput, match=r"target_modules \('q_proj',\), but the adapter has No"):
        engine.load("b", tmp_path, with_optimizer=False)
