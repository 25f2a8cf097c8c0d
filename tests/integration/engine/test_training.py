"""Training matches PEFT with torch's AdamW, for one adapter and for many."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.integration.engine.conftest import MakeEngine
from tests.support.engine_calls import datum, forward_backward, spec, step, weights, work
from tinkex.engine.protocol import EngineFailure, Pass, StepRefused
from tinkex.engine.torch_engine import TorchEngine
from tinkex.errors import InvalidInput
from tinkex.types import Datum, ForwardBackwardOutput, ModelInput

LENGTHS = (5, 12, 12, 30, 7)


def batch(number: int) -> list:
    return [datum(100 * number + index, length) for index, length in enumerate(LENGTHS)]


def test_twenty_steps_match_peft_with_torch_adamw(engine: TorchEngine, folder: Path) -> None:
    engine.create("a", spec(rank=4))
    adapter = engine._adapters["a"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=32, target_modules=[*modules, "lm_head"])
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = get_peft_model(base, config)
    theirs = dict(model.named_parameters())
    for path, down, up in adapter.layout.pairs(adapter.state.weights):
        theirs[f"base_model.model.{path}.lora_A.default.weight"].data.copy_(down)
        theirs[f"base_model.model.{path}.lora_B.default.weight"].data.copy_(up)
    trained = [one for one in model.parameters() if one.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)

    for number in range(20):
        loss = torch.zeros(())
        for one in batch(number):
            tokens = torch.tensor(one.model_input.to_ints())
            logits = model(input_ids=tokens.unsqueeze(0)).logits[0]
            targets = torch.from_numpy(one.loss_fn_inputs["target_tokens"].to_numpy())
            logprobs = logits.log_softmax(-1).gather(1, targets.unsqueeze(1))[:, 0]
            weights_T = torch.from_numpy(one.loss_fn_inputs["weights"].to_numpy())
            loss = loss - (logprobs * weights_T).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 5.0)
        adamw.step()
        adamw.zero_grad()
        ours = forward_backward(engine, "a", *batch(number))
        metrics = step(engine, "a", weight_decay=0.01, grad_clip_norm=5.0)
        assert ours.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert metrics["step"] == number + 1

    for path, down, up in adapter.layout.pairs(adapter.state.weights):
        for name, mine in (("lora_A", down), ("lora_B", up)):
            other = theirs[f"base_model.model.{path}.{name}.default.weight"]
            torch.testing.assert_close(mine, other.data, atol=1e-4, rtol=1e-3)


def test_new_adapter_leaves_logprobs_unchanged(engine: TorchEngine) -> None:
    engine.create("one", spec(rank=1, seed=1))
    engine.create("two", spec(rank=64, seed=2))
    first, second = (forward_backward(engine, name, *batch(0)) for name in ("one", "two"))
    for mine, other in zip(first.loss_fn_outputs, second.loss_fn_outputs, strict=True):
        assert np.array_equal(mine["logprobs"].to_numpy(), other["logprobs"].to_numpy())


def test_seed_determines_initial_weights(engine: TorchEngine) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        engine.create(name, spec(seed=seed))
    assert torch.equal(weights(engine, "a"), weights(engine, "b"))
    assert not torch.equal(weights(engine, "a"), weights(engine, "c"))


def train_together(engine: TorchEngine, ranks: list[int], num_steps: int) -> list[torch.Tensor]:
    """Ranks that are multiples of 16 train with Dimuon."""
    for rank in ranks:
        optimizer = {"type": "adamw" if rank % 16 else "dimuon"}
        engine.create(str(rank), spec(rank=rank, seed=rank, optimizer=optimizer))
    for number in range(num_steps):
        passes = [
            Pass(adapter_id=str(rank), request=work(*batch(number + 10 * rank))) for rank in ranks
        ]
        outcomes = engine.run_passes(passes)
        assert all(isinstance(one, ForwardBackwardOutput) for one in outcomes)
        for rank in ranks:
            step(engine, str(rank))
    return [weights(engine, str(rank)) for rank in ranks]


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_eight_adapters_train_together_as_alone(
    make_engine: MakeEngine, is_deterministic: bool
) -> None:
    ranks = [1, 2, 4, 8, 16, 32, 48, 64]
    together = train_together(make_engine(is_deterministic=is_deterministic), ranks, 4)
    for rank, mine in zip(ranks, together, strict=True):
        (alone,) = train_together(make_engine(is_deterministic=is_deterministic), [rank], 4)
        if is_deterministic:
            assert torch.equal(mine, alone)
        else:
            torch.testing.assert_close(mine, alone, atol=1e-5, rtol=1e-3)


def test_two_passes_then_step_equal_one_combined_pass(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.create("split", spec())
    engine.create("whole", spec())
    forward_backward(engine, "split", *batch(1))
    forward_backward(engine, "split", *batch(2))
    forward_backward(engine, "whole", *batch(1), *batch(2))
    step(engine, "split")
    step(engine, "whole")
    torch.testing.assert_close(weights(engine, "split"), weights(engine, "whole"))


def test_token_budget_does_not_change_results(make_engine: MakeEngine) -> None:
    results = []
    for pass_tokens in (13, 40, 4096):
        engine = make_engine(pass_tokens=pass_tokens)
        engine.create("a", spec())
        output = forward_backward(engine, "a", *batch(1))
        step(engine, "a")
        results.append((output, weights(engine, "a")))
    for output, found in results[1:]:
        torch.testing.assert_close(found, results[0][1], atol=1e-5, rtol=1e-3)
        assert output.metrics["loss:sum"] == pytest.approx(results[0][0].metrics["loss:sum"])
        for mine, other in zip(output.loss_fn_outputs, results[0][0].loss_fn_outputs, strict=True):
            np.testing.assert_allclose(
                mine["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5
            )


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_interleaved_passes_are_bit_identical(
    make_engine: MakeEngine, is_deterministic: bool
) -> None:
    options = {"step_tokens": 13, "is_deterministic": is_deterministic}
    calm, busy = make_engine(**options), make_engine(**options)
    passes = {
        name: [Pass(adapter_id=name, request=work(*batch(number)))]
        for number, name in enumerate(("a", "b"))
    }
    for engine in (calm, busy):
        for name in passes:
            engine.create(name, spec())
    wanted = {name: calm.run_passes(each) for name, each in passes.items()}

    runs = {name: busy.start_passes(each) for name, each in passes.items()}
    found: dict[str, object] = {}
    num_turns = 0
    while len(found) < len(runs):
        num_turns += 1
        for name, run in runs.items():
            if name not in found and (outcomes := run.step()) is not None:
                found[name] = outcomes
        if num_turns == 2:
            # A pass takes effect only when it is complete.
            assert busy._adapters["a"].state.gradient is None
            busy.create("other", spec(seed=3))
            forward_backward(busy, "other", *batch(5))
            step(busy, "other")
    assert num_turns > 3
    for name in passes:
        (mine,), (theirs,) = found[name], wanted[name]  # type: ignore[misc]
        assert mine.metrics == theirs.metrics
        for one, other in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            assert one["logprobs"].to_numpy().tobytes() == other["logprobs"].to_numpy().tobytes()
        step(calm, name)
        step(busy, name)
        assert torch.equal(weights(calm, name), weights(busy, name))


def test_cancelled_pass_leaves_no_gradient(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=13)
    engine.create("a", spec())
    run = engine.start_passes([Pass(adapter_id="a", request=work(*batch(1)))])
    assert run.step() is None
    run.cancel()
    assert engine._adapters["a"].state.gradient is None


def test_step_without_gradient_changes_nothing(engine: TorchEngine) -> None:
    engine.create("a", spec())
    forward_backward(engine, "a", *batch(0))
    step(engine, "a")
    output = forward_backward(engine, "a", *batch(1), forward_only=True)
    assert output.metrics["loss:sum"] > 0
    state = engine._adapters["a"].state
    before = {name: buffer.clone() for name, buffer in state.buffers().items()}
    metrics = step(engine, "a")
    assert metrics == {
        "grad_norm": 0.0,
        "learning_rate": metrics["learning_rate"],
        "param_norm": pytest.approx(float(state.weights.norm()), rel=1e-6),
        "update_norm": 0.0,
        "step": 1.0,
        "clipped": 0.0,
        "has_gradient": 0.0,
    }
    assert state.num_steps == 1
    assert all(torch.equal(before[name], buffer) for name, buffer in state.buffers().items())


def test_invalid_pass_does_not_affect_others(engine: TorchEngine) -> None:
    for name in ("good", "bad", "alone"):
        engine.create(name, spec())
    bad = datum(1, target_tokens=np.full(12, 100_000))
    passes = [
        Pass(adapter_id="bad", request=work(datum(2), bad)),
        Pass(adapter_id="good", request=work(*batch(1))),
        Pass(adapter_id="unknown", request=work(*batch(1))),
    ]
    first, second, third = engine.run_passes(passes)
    assert isinstance(first, EngineFailure)
    assert "100000" in first.message
    assert isinstance(second, ForwardBackwardOutput)
    assert isinstance(third, EngineFailure)
    forward_backward(engine, "alone", *batch(1))
    assert step(engine, "bad")["has_gradient"] == 0.0
    step(engine, "good")
    step(engine, "alone")
    torch.testing.assert_close(weights(engine, "good"), weights(engine, "alone"))


def test_non_finite_gradient_is_reported_and_rejected(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.create("a", spec())
    forward_backward(engine, "a", *batch(1))
    bad = datum(3, weights=np.full(12, 3e38, np.float32))
    output = forward_backward(engine, "a", bad)
    assert output.metrics["loss:sum"] > 1e38
    assert output.metrics["nonfinite_gradient:max"] == 1.0
    before = weights(engine, "a")
    with pytest.raises(StepRefused, match=r"NaN or infinity.*dropped"):
        step(engine, "a")
    assert torch.equal(weights(engine, "a"), before)
    # The gradient was dropped, so that training can continue.
    forward_backward(engine, "a", *batch(1))
    assert step(engine, "a")["step"] == 1

    willing = make_engine(is_nonfinite_applied=True)
    willing.create("a", spec())
    forward_backward(willing, "a", bad)
    step(willing, "a")
    assert not torch.isfinite(weights(willing, "a")).all()


def test_out_of_memory_retries_in_smaller_batches(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy, tight = make_engine(), make_engine()
    for engine in (roomy, tight):
        engine.create("a", spec())
        engine.create("b", spec(seed=2))
    host = tight._registry.get("tiny").hosted_model
    plain, sizes = host.hidden_states, []

    def run_out_of_memory(tokens_T: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        sizes.append(len(tokens_T))
        if len(tokens_T) > 40:
            raise torch.OutOfMemoryError("the card is full")
        return plain(tokens_T, *args, **options)

    monkeypatch.setattr(host, "hidden_states", run_out_of_memory)
    passes = [Pass(adapter_id=name, request=work(*batch(1), *batch(2))) for name in ("a", "b")]
    passes.append(Pass(adapter_id="b", request=work(datum(9, 50), datum(10, 4))))
    *good, bad = tight.run_passes(passes)
    assert max(sizes) > 40
    assert isinstance(bad, EngineFailure)
    assert "50 tokens" in bad.message
    for mine, other in zip(good, roomy.run_passes(passes[:2]), strict=True):
        assert isinstance(mine, ForwardBackwardOutput)
        assert mine.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"])
    for name in ("a", "b"):
        step(tight, name)
        step(roomy, name)
        torch.testing.assert_close(weights(tight, name), weights(roomy, name), atol=1e-5, rtol=1e-3)


def test_unexpected_error_in_one_pass_runs_others_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calm = make_engine(), make_engine()
    for one in (engine, calm):
        for name in ("a", "b", "c"):
            one.create(name, spec())
    host = engine._registry.get("tiny").hosted_model
    plain = host.hidden_states

    def fail_for_token_7(tokens_T: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        if 7 in tokens_T.tolist():
            raise ValueError("a kernel has a bug")
        return plain(tokens_T, *args, **options)

    monkeypatch.setattr(host, "hidden_states", fail_for_token_7)
    fine = [one for one in batch(1) if 7 not in one.model_input.to_ints()]
    unlucky = Datum(
        model_input=ModelInput.from_ints([7, 8]), loss_fn_inputs={"target_tokens": [8, 9]}
    )
    passes = [
        Pass(adapter_id="a", request=work(*fine)),
        Pass(adapter_id="b", request=work(unlucky)),
        Pass(adapter_id="c", request=work(*fine)),
    ]
    first, second, third = engine.run_passes(passes)
    assert isinstance(second, EngineFailure)
    assert "a kernel has a bug" in second.message
    assert engine._adapters["b"].state.gradient is None
    wanted, *_ = calm.run_passes(passes[:1])
    for mine in (first, third):
        assert isinstance(mine, ForwardBackwardOutput)
        assert mine.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"])
    for name in ("a", "c"):
        torch.testing.assert_close(
            engine._adapters[name].state.gradient, calm._adapters["a"].state.gradient
        )


def test_only_requested_modules_are_trained(engine: TorchEngine) -> None:
    engine.create("mlp", spec(train_attn=False, train_unembed=False))
    engine.create("head", spec(train_attn=False, train_mlp=False))
    for name, mark in (("mlp", ".mlp."), ("head", "lm_head")):
        adapter = engine._adapters[name]
        before = copy.deepcopy(dict(_named(adapter)))
        forward_backward(engine, name, *batch(1))
        step(engine, name)
        after = dict(_named(adapter))
        assert after
        assert all(mark in path for path in after)
        assert all(not torch.equal(after[path], before[path]) for path in after)


def _named(adapter):
    for path, _, up in adapter.layout.pairs(adapter.state.weights):
        yield path, up.clone()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 100_000}, "rank is 100000"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "nothing to train"),
        ({"optimizer": {"type": "sgd"}}, "optimizer type 'sgd' is not one of adamw, dimuon"),
    ],
)
def test_invalid_adapter_spec_raises(engine: TorchEngine, wrong: dict, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        engine.create("a", spec(**wrong))
    assert not engine.has_adapter("a")
