"""Losses of the stages compared with direct computations, and their training progress."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.integration.pipeline.stage_inputs import (
    make_stage_inputs,
    make_tokenizer,
    tiny_model,
    write_rows,
    write_samples,
)
from tinkex.errors import ConfigError
from tinkex.nn.ops.cross_entropy import CHUNK_ROWS, target_logprobs, weighted_cross_entropy
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.stages import DistillStage, DpoStage, PretrainStage, SftStage
from tinkex.pipeline.tokenizer import TextTokenizer

LENGTHS = (9, 9, 5, 17, 1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "made", list(data.values()))


def random_tokens(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.randint(0, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))


def logits_alone(model: Any, tokens_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Compute the logits of transformers, one document at a time."""
    return torch.cat([model(part[None]).logits[0] for part in tokens_T.split(lengths)])


def other_family(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 120,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("kind", ["dense", "moe", "llama", "qwen2"])
def test_packed_forward_matches_single_documents(tokenizer: TextTokenizer, kind: str) -> None:
    if kind in ("llama", "qwen2"):
        model = other_family(kind)
    else:
        model = tiny_model(tokenizer, use_moe=kind == "moe")
    tokens_T = random_tokens(model.config.vocab_size)
    targets_T = tokens_T.flip(0)
    weights_T = torch.linspace(0.0, 2.0, len(tokens_T))

    run = PackedForward(model)
    hidden = run(tokens_T, LENGTHS)
    loss = weighted_cross_entropy(hidden.states_TD, run.head_VD, targets_T, weights_T)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    logits_TV = logits_alone(model, tokens_T, LENGTHS)
    expected = (cross_entropy(logits_TV, targets_T, reduction="none") * weights_T).sum()
    expected.backward()
    torch.testing.assert_close(hidden.states_TD @ run.head_VD.t(), logits_TV, **CLOSE)
    torch.testing.assert_close(loss, expected, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_documents_do_not_influence_each_other(tokenizer: TextTokenizer) -> None:
    run = PackedForward(tiny_model(tokenizer))
    tokens_T = random_tokens(tokenizer.vocab_size)
    changed_T = tokens_T.clone()
    changed_T[:9] = (changed_T[:9] + 1) % tokenizer.vocab_size
    with torch.no_grad():
        before, after = (run(some, LENGTHS).states_TD for some in (tokens_T, changed_T))
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[:9], after[:9])


def test_chunked_cross_entropy_matches_full_logits(tokenizer: TextTokenizer) -> None:
    torch.manual_seed(0)
    num_rows = 2 * CHUNK_ROWS + 7
    hidden_PD = torch.randn(num_rows, 8, requires_grad=True)
    weight_VD = torch.randn(11, 8, requires_grad=True)
    targets_P, slopes_P = torch.randint(0, 11, (num_rows,)), torch.randn(num_rows)
    ours = target_logprobs(hidden_PD, weight_VD, targets_P)
    theirs = -cross_entropy(hidden_PD @ weight_VD.t(), targets_P, reduction="none")
    torch.testing.assert_close(ours, theirs, **CLOSE)
    expected = torch.autograd.grad((theirs * slopes_P).sum(), (hidden_PD, weight_VD))
    for mine in (
        torch.autograd.grad((ours * slopes_P).sum(), (hidden_PD, weight_VD)),
        torch.autograd.grad(
            3.0 * weighted_cross_entropy(hidden_PD, weight_VD, targets_P, -slopes_P / 3.0),
            (hidden_PD, weight_VD),
        ),
    ):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_bfloat16_forward_is_close_with_float32_gradients(tokenizer: TextTokenizer) -> None:
    model = tiny_model(tokenizer)
    tokens_T = random_tokens(tokenizer.vocab_size)
    ones_T = torch.ones(len(tokens_T))
    totals = []
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad(set_to_none=True)
        run = PackedForward(model, dtype)
        loss = weighted_cross_entropy(
            run(tokens_T, LENGTHS).states_TD, run.head_VD, tokens_T.flip(0), ones_T
        )
        loss.backward()
        totals.append(loss.item())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert totals[1] == pytest.approx(totals[0], rel=0.02)


def test_sft_loss_counts_only_assistant_tokens(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("sft", tmp_path, data["sft"], tokenizer)
    stage = SftStage(setting)
    batch = stage.source.batch(0, 0)
    loss = stage.loss(batch)
    logits_TV = logits_alone(stage.model, batch.tokens_T, batch.lengths)
    each_T = cross_entropy(logits_TV, batch.targets_T, reduction="none")
    assert loss.weight == batch.loss_mask_T.sum()
    assert 0 < loss.weight < len(each_T)
    torch.testing.assert_close(loss.total, each_T[batch.loss_mask_T].sum(), **CLOSE)


def test_router_aux_loss_and_its_gradient(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("pretrain", tmp_path, data["pretrain"], tokenizer, use_moe=True)
    stage = PretrainStage(setting)
    batch = stage.source.batch(0, 0)
    hidden = stage.forward(batch.tokens_T, batch.lengths)
    assert hidden.router_aux_loss is not None
    theirs: Any = stage.model
    out = theirs(batch.tokens_T.split(batch.lengths)[0][None], output_router_logits=True)
    one = stage.forward(batch.tokens_T[: batch.lengths[0]], batch.lengths[:1])
    assert one.router_aux_loss is not None
    coefficient = float(stage.model.config.router_aux_loss_coef)
    assert one.router_aux_loss.item() == pytest.approx(out.aux_loss.item() * coefficient, rel=1e-4)
    loss = stage.loss(batch)
    text = weighted_cross_entropy(
        hidden.states_TD, stage.forward.head_VD, batch.targets_T, torch.ones(batch.num_tokens)
    )
    assert loss.total.item() == pytest.approx(
        text.item() + hidden.router_aux_loss.item() * loss.weight, rel=1e-5
    )


# --- preferences ----------------------------------------------------------------------------


def summed_logprob(model: Any, tokens: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Compute an answer's log-probability from the logits of transformers."""
    logprobs = log_softmax(model(tokens[None]).logits[0].double(), dim=-1)
    each = logprobs[torch.arange(len(targets)), targets]
    return (each * counted).sum()


def dpo_by_hand(policy: Any, reference: Any, batch: Any, beta: float) -> Tensor:
    columns = (batch.tokens_T, batch.targets_T, batch.loss_mask_T)
    parts = list(zip(*(column.split(batch.lengths) for column in columns), strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for better, other in zip(parts[::2], parts[1::2], strict=True):
        with torch.no_grad():
            base = summed_logprob(reference, *better) - summed_logprob(reference, *other)
        gain = summed_logprob(policy, *better) - summed_logprob(policy, *other) - base
        total = total - torch.log(torch.sigmoid(beta * gain))
    return total


def test_dpo_loss_matches_the_published_formula(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("dpo", tmp_path, data["dpo"], tokenizer, "--beta", "0.3")
    other = tiny_model(tokenizer, seed=5)
    stage = DpoStage(setting, other)
    batch = stage.source.batch(0, 0)
    loss = stage.loss(batch)
    loss.total.backward()
    found = {name: parameter.grad for name, parameter in stage.model.named_parameters()}
    stage.model.zero_grad(set_to_none=True)
    expected = dpo_by_hand(stage.model, other, batch.token_batch, 0.3)
    expected.backward()
    assert loss.weight == batch.num_samples == 4
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in stage.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert all(parameter.grad is None for parameter in other.parameters())


def test_dpo_reference_is_a_frozen_copy(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    stage = DpoStage(make_stage_inputs("dpo", tmp_path, data["dpo"], tokenizer), None)
    batch = stage.source.batch(0, 0)
    loss = stage.loss(batch)
    assert loss.total.item() / loss.weight == pytest.approx(0.693147, rel=1e-5)
    assert stage.evaluate()["preference_accuracy"] == 0.5
    start = copy.deepcopy(stage.model.state_dict())
    step(stage, 3, 1e-2)
    reference_weights = stage.reference._model.state_dict()
    assert all(torch.equal(reference_weights[name], start[name]) for name in start)
    assert any(
        not torch.equal(value, start[name]) for name, value in stage.model.state_dict().items()
    )


def test_extreme_dpo_margin_does_not_overflow(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("dpo", tmp_path, data["dpo"], tokenizer, "--beta", "1e6")
    stage = DpoStage(setting, tiny_model(tokenizer, seed=5))
    loss = stage.loss(stage.source.batch(0, 0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all() for p in stage.model.parameters()
    )


# --- reasoning ------------------------------------------------------------------------------


def test_tag_weights_apply_only_to_targets(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    # The user message also contains a tag, which is not a target.
    ask = {"role": "user", "content": "Write <think> or 7."}
    say = {"role": "assistant", "content": "<think>7</think><answer>7</answer>"}
    path = write_rows(tmp_path / "r1.jsonl", [{"messages": [ask, say]}])
    setting = make_stage_inputs("r1", tmp_path, path, tokenizer, "--r1_token_weight", "10")
    stage = DistillStage(setting, None)
    batch = stage.source.batch(0, 0)
    loss = stage.loss(batch)
    logits_TV = logits_alone(stage.model, batch.tokens_T, batch.lengths)
    each_T = cross_entropy(logits_TV, batch.targets_T, reduction="none")
    texts = [tokenizer.decode([token]) for token in batch.targets_T.tolist()]
    weights = [
        float(counts) * (10.0 if text in setting.settings.r1_tokens else 1.0)
        for text, counts in zip(texts, batch.loss_mask_T.tolist(), strict=True)
    ]
    # <think> 7 </think> <answer> 7 </answer> <|im_end|>
    assert [weight for weight in weights if weight] == [10, 1, 10, 10, 1, 10, 1]
    assert texts.count("<think>") == 2
    assert loss.weight == 7
    torch.testing.assert_close(loss.total, (each_T * torch.tensor(weights)).sum(), **CLOSE)


def test_multi_token_tag_is_rejected(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    setting = make_stage_inputs("r1", tmp_path, data["r1"], tokenizer, "--r1_tokens", "<thinking>")
    with pytest.raises(ConfigError, match="'<thinking>' is not a single token"):
        DistillStage(setting, None)


def test_distillation_loss_matches_the_published_formula(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    words = ("--distill_alpha", "0.25", "--distill_temperature", "2", "--r1_token_weight", "1")
    setting = make_stage_inputs("r1", tmp_path, data["r1"], tokenizer, *words)
    teacher = tiny_model(tokenizer, seed=9)
    stage = DistillStage(setting, teacher)
    batch = stage.source.batch(0, 0)
    loss = stage.loss(batch)
    loss.total.backward()
    found = {name: parameter.grad for name, parameter in stage.model.named_parameters()}
    stage.model.zero_grad(set_to_none=True)

    counted = batch.loss_mask_T
    logits = logits_alone(stage.model, batch.tokens_T, batch.lengths)[counted]
    with torch.no_grad():
        teacher_logprobs = log_softmax(
            logits_alone(teacher, batch.tokens_T, batch.lengths)[counted] / 2.0, dim=-1
        )
    text = cross_entropy(logits, batch.targets_T[counted], reduction="sum")
    apart = torch.nn.functional.kl_div(
        log_softmax(logits / 2.0, dim=-1), teacher_logprobs, log_target=True, reduction="sum"
    )
    expected = 0.25 * text + 0.75 * 4.0 * apart
    expected.backward()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in stage.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-3, msg=name)


# --- each stage moves its own metric --------------------------------------------------------


def step(stage: Any, num_steps: int, rate: float) -> None:
    """A minimal training loop."""
    optimizer = torch.optim.AdamW(stage.model.parameters(), lr=rate)
    num_batches = stage.source.num_batches(0)
    for number in range(num_steps):
        loss = stage.loss(stage.source.batch(*divmod(number, num_batches)))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "make", "metric", "gain"),
    [
        ("pretrain", PretrainStage, "loss", -1.0),
        ("sft", SftStage, "loss", -1.0),
        ("dpo", lambda setting: DpoStage(setting, None), "preference_accuracy", 0.2),
        ("r1", lambda setting: DistillStage(setting, None), "loss", -1.0),
    ],
)
def test_training_improves_the_stage_metric(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    data: dict[str, Path],
    name: str,
    make: Any,
    metric: str,
    gain: float,
) -> None:
    stage = make(make_stage_inputs(name, tmp_path, data[name], tokenizer))
    before = stage.evaluate()
    step(stage, 20, 5e-3)
    moved = stage.evaluate()[metric] - before[metric]
    assert moved / gain >= 1.0
    own = {"dpo": "preference_accuracy", "r1": "exact_match"}.get(name, "loss")
    assert next(iter(before)) == own


def test_stage_config_fields(
    tmp_path: Path, tokenizer: TextTokenizer, data: dict[str, Path]
) -> None:
    one, other = (
        DpoStage(
            make_stage_inputs("dpo", tmp_path, data["dpo"], tokenizer, "--beta", beta), None
        ).config
        for beta in ("0.1", "0.2")
    )
    assert {name for name in one if one[name] != other[name]} == {"beta"}
    assert one["model"]["hidden_size"] == 32
    assert one["tokenizer"] == tokenizer.digest
