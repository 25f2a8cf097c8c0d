from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, GptOssConfig, Lfm2Config, MambaConfig

from tests.integration.nn.architectures import (
    ARCHITECTURES,
    VOCAB_SIZE,
    WITH_EXPERTS,
    build,
    build_of,
)
from tests.integration.nn.peft_reference import (
    RANK,
    SCALE,
    HostAndPeft,
    ModelOutput,
    run,
    trained_weights,
)
from tinkex.errors import ConfigError
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.fused_layers import FusedAttention, FusedGatedMLP
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import LoraLayout, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.packed_attention import PackedAttention

LENGTHS = (13, 4, 21, 21, 1)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=rng) for length in lengths]


def dlogits(num_rows: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


def assert_same(found: ModelOutput, expected: ModelOutput) -> None:
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=2e-5)
    assert found.gradient.keys() == expected.gradient.keys()
    for path, pair in found.gradient.items():
        for ours, theirs in zip(pair, expected.gradient[path], strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error < 1e-4, (path, error)
            assert theirs.abs().max() > 0, path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hosted_model_matches_original_logits(name: str) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    host = HostedModel(model)
    with torch.no_grad():
        found = run(host, SegmentedLora([]), sequences(), dlogits()).log_softmax(-1)
        expected = torch.cat(
            [plain(input_ids=one.unsqueeze(0)).logits[0].log_softmax(-1) for one in sequences()]
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "parts", [(TargetKind.ATTENTION, TargetKind.MLP), tuple(TargetKind)], ids=["layers", "all"]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_match_peft(name: str, parts: tuple[TargetKind, ...]) -> None:
    models = HostAndPeft(build(name), parts)
    assert_same(
        models.run_host(sequences(), dlogits()),
        models.run_peft(sequences(), dlogits()),
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_activation_checkpointing_does_not_change_results(name: str) -> None:
    models = HostAndPeft(build(name))
    assert_same(
        models.run_host(sequences(), dlogits(), checkpoint_activations=True),
        models.run_host(sequences(), dlogits()),
    )


def test_activation_checkpointing_saves_fewer_activations() -> None:
    models = HostAndPeft(build("qwen3", num_hidden_layers=6))
    assert 3 * saved_bytes(models, checkpoint_activations=True) < saved_bytes(
        models, checkpoint_activations=False
    )


def saved_bytes(models: HostAndPeft, *, checkpoint_activations: bool) -> int:
    storages: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    views = models.layout.views
    gradient = views(torch.zeros_like(models.weights))
    rows = SegmentedLora([LoraSegment(0, sum(LENGTHS), SCALE, views(models.weights), gradient)])
    context = ForwardContext(rows, PackedAttention(LENGTHS))
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        models.host.hidden_states(
            torch.cat(sequences()),
            positions(),
            context,
            checkpoint_activations=checkpoint_activations,
        )
    return sum(storages.values())


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_adapters_in_one_batch_match_separate_passes(name: str) -> None:
    host = HostedModel(build(name))
    layout = LoraLayout(host.lora_targets, RANK, tuple(TargetKind))
    weights = [trained_weights(layout, seed) for seed in (3, 4)]
    together = [torch.zeros_like(one) for one in weights]
    # The first rows use the base model, then two trained adapters, then one without gradient.
    bounds = [(13, 17), (17, 59), (59, 60)]
    segments = [
        LoraSegment(*bounds[0], SCALE, layout.views(weights[0]), layout.views(together[0])),
        LoraSegment(*bounds[1], SCALE, layout.views(weights[1]), layout.views(together[1])),
        LoraSegment(*bounds[2], SCALE, layout.views(weights[0])),
    ]
    logits = run(host, SegmentedLora(segments), sequences(), dlogits())
    for number, ones in enumerate(([1], [2, 3])):
        alone = torch.zeros_like(weights[number])
        start, stop = bounds[number]
        views = layout.views(weights[number]), layout.views(alone)
        rows = SegmentedLora([LoraSegment(0, stop - start, SCALE, *views)])
        own = run(host, rows, [sequences()[one] for one in ones], dlogits()[start:stop])
        torch.testing.assert_close(logits[start:stop], own, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(together[number], alone, rtol=1e-3, atol=1e-4)
    base = run(host, SegmentedLora([]), sequences()[:1], dlogits()[:13])
    torch.testing.assert_close(logits[:13], base, rtol=1e-4, atol=2e-5)


def test_experts_beside_dense_layers_match_original_logits() -> None:
    model = build("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    plain = copy.deepcopy(model)
    host = HostedModel(model)
    with torch.no_grad():
        found = run(host, SegmentedLora([]), sequences(), dlogits())
        expected = torch.cat([plain(input_ids=one.unsqueeze(0)).logits[0] for one in sequences()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    kinds = [
        bool(target.num_experts) for target in host.lora_targets if target.kind is TargetKind.MLP
    ]
    assert sorted(kinds) == [False, False, True, True, True, True]


def test_routers_are_not_adapted() -> None:
    for name in WITH_EXPERTS:
        paths = [path for target in HostedModel(build(name)).lora_targets for path in target.paths]
        assert not [path for path in paths if path.endswith((".gate", ".router"))]
        assert [path for path in paths if path.endswith("experts.gate_up_proj")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_float32_adapters_on_16_bit_base_weights(name: str, dtype: torch.dtype) -> None:
    coarse, fine = (
        HostAndPeft(build(name, dtype=dtype)),
        HostAndPeft(build(name, dtype=dtype).float()),
    )
    found = coarse.run_host(sequences(), dlogits().to(dtype))
    expected = fine.run_host(sequences(), dlogits())
    error = (found.logits.float().log_softmax(-1) - expected.logits.log_softmax(-1)).abs()
    assert error.mean() < 0.05
    for path, pair in found.gradient.items():
        for ours, theirs in zip(pair, expected.gradient[path], strict=True):
            assert ours.dtype == torch.float32
            similarity = torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
            assert similarity > 0.95, (path, similarity)


def test_16_bit_base_weights_are_not_copied_to_float32() -> None:
    gc.collect()
    before = all_tensors()
    host = HostedModel(build("qwen3", dtype=torch.bfloat16))
    gc.collect()
    known = {id(one) for one in before}
    new = [one for one in all_tensors() if id(one) not in known]
    smallest = min(target.in_features * sum(target.out_features) for target in host.lora_targets)
    assert max(one.numel() for one in new if one.dtype == torch.float32) < smallest
    assert max(one.numel() for one in new if one.dtype == torch.bfloat16) >= smallest


def all_tensors() -> list[Tensor]:
    # By type: isinstance() makes some lazy modules warn.
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def test_forward_leaves_no_references() -> None:
    for name in ("gpt2", "olmo2", "qwen3", "qwen3_moe"):
        host = HostedModel(build(name))
        context = ForwardContext(SegmentedLora([]), PackedAttention(LENGTHS))
        hidden = host.hidden_states(torch.cat(sequences()), positions(), context)
        refs = [weakref.ref(one) for one in (hidden, context.attention, context.lora)]
        del hidden, context
        gc.collect()
        assert [ref() for ref in refs] == [None, None, None], name


class _Failing(PackedAttention):
    def attend(self, layer: int, *args: Any) -> Tensor:
        if layer == 1:
            raise MemoryError("out of memory")
        return super().attend(layer, *args)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "qwen3"])
def test_failed_pass_leaves_no_references_and_the_next_works(name: str) -> None:
    models = HostAndPeft(build(name))
    expected = models.run_host(sequences(), dlogits())
    rows = SegmentedLora([LoraSegment(0, sum(LENGTHS), SCALE, models.layout.views(models.weights))])
    attention = _Failing(LENGTHS)
    with pytest.raises(MemoryError):
        models.host.hidden_states(
            torch.cat(sequences()), positions(), ForwardContext(rows, attention)
        )
    ref = weakref.ref(rows)
    del rows, attention
    gc.collect()
    assert ref() is None
    assert_same(models.run_host(sequences(), dlogits()), expected)


def test_failure_between_merged_linears_leaves_no_references() -> None:
    host = HostedModel(build("olmo2"))
    k_proj = host.model.model.layers[1].self_attn.k_proj
    hook = k_proj.register_forward_pre_hook(_fail)
    refs: list[weakref.ref[Tensor]] = []
    first = host.model.model.layers[1].self_attn.q_proj
    other = first.register_forward_hook(lambda _, args, out: refs.append(weakref.ref(args[0])))
    with pytest.raises(MemoryError), torch.no_grad():
        run(host, SegmentedLora([]), sequences(), dlogits())
    hook.remove()
    other.remove()
    gc.collect()
    assert [ref() for ref in refs] == [None]


def _fail(*_: object) -> None:
    raise MemoryError("out of memory")


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (MambaConfig, {"state_size": 4}, "linear_attention|mixes tokens"),
        (BloomConfig, {}, "attends once"),
        (
            GptOssConfig,
            {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8},
            "off by",
        ),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, "conv"),
    ],
)
def test_unsupported_token_mixing_is_rejected(
    kind: type[Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be hosted: .*({reason})"):
        HostedModel(build_of(kind, fields))


def test_ignored_sliding_window_is_rejected() -> None:
    kinds = ["sliding_attention", "sliding_attention"]
    model = build("qwen3", use_sliding_window=True, sliding_window=100, layer_types=kinds)
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ConfigError, match="a window of None, where its config says 100"):
        HostedModel(model)


def test_longrope_limits_context_to_original_length() -> None:
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors}
    rope |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert HostedModel(model).max_positions == 32
    assert HostedModel(build("phi3")).max_positions is None


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "phi3", "granite"])
def test_common_architectures_use_fused_modules(name: str) -> None:
    kinds = {type(module) for module in HostedModel(build(name)).model.modules()}
    assert kinds >= {FrozenRMSNorm, FusedGatedMLP, FusedAttention}


def test_non_equivalent_module_is_not_replaced() -> None:
    model = build("llama")
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: 1.01 * plain(x)
    host = HostedModel(model)
    kinds = [type(one.mlp) for one in host.model.model.layers]
    assert kinds == [type(layer.mlp), FusedGatedMLP]
    assert kinds[0] is not FusedGatedMLP


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_bfloat16_checkpoint_keeps_two_bytes_per_weight(name: str) -> None:
    exact, rounded = build(name), build(name).bfloat16().float()
    num_weights = sum(weight.numel() for weight in rounded.parameters())
    host = HostedModel(rounded, packed_bytes=1 << 30)
    # Norms stay in float32, and the last panels are padded.
    assert 1.9 * num_weights < host.num_bytes < 2.2 * num_weights
    assert 3.9 * num_weights < HostedModel(exact).num_bytes < 4.2 * num_weights


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_sixteen_bit_weights_give_the_bits_of_float32(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[torch.Tensor]:
        host = HostedModel(build(name).bfloat16().float())
        return [run(host, SegmentedLora([]), [torch.arange(n)], dlogits(n)) for n in (1, 7, 65)]

    narrow = results()
    monkeypatch.setattr("tinkex.nn.ops.packed_matmul._is_exact", lambda weight, dtype: False)
    assert all(map(torch.equal, narrow, results()))


def test_tied_head_and_embedding_share_their_weight() -> None:
    model = build("qwen3")
    expected = model.get_input_embeddings().weight.detach().clone()
    host = HostedModel(model)
    assert all(one.shape != expected.shape for one in host.model.parameters() if not one.is_meta)
    assert torch.equal(host.model.get_input_embeddings()(torch.arange(len(expected))), expected)
    assert torch.equal(host.lm_head.weight_VD, expected)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("autograd", "packed_matmul"):
        monkeypatch.setattr(f"tinkex.nn.ops.{module}.load_kernels", lambda: None)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_copies_match_for_any_number_of_rows(name: str) -> None:
    plain, packed = HostedModel(build(name)), HostedModel(build(name), packed_bytes=1 << 30)
    for length in (1, 2, 17, 64, 65):
        one = [torch.arange(length)]
        with torch.no_grad():
            expected = run(plain, SegmentedLora([]), one, dlogits(length))
            found = [run(packed, SegmentedLora([]), one, dlogits(length)) for _ in range(2)]
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(*found)


@pytest.mark.usefixtures("without_kernels")
def test_copies_respect_the_memory_limit() -> None:
    alone = HostedModel(build("llama")).num_bytes

    def copies(num_bytes: int) -> int:
        return HostedModel(build("llama"), packed_bytes=num_bytes).num_bytes - alone

    whole = copies(1 << 30)
    assert copies(0) == 0
    assert 0 < copies(whole // 2) <= whole // 2
    assert copies(whole) == whole
