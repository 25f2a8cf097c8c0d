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
from tinkex.nn.lora_linear import MergedLinearPart
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.ops.rms_norm import FrozenRMSNorm
from tinkex.nn.packed_attention import PackedAttention

LENGTHS = (13, 4, 21, 21, 1)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=rng) for length in lengths]


def slopes(num_rows: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


def assert_same(found: ModelOutput, expected: ModelOutput) -> None:
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=2e-5)
    assert found.gradient.keys() == expected.gradient.keys()
    for path, pair in found.gradient.items():
        for ours, theirs in zip(pair, expected.gradient[path], strict=True):
            off = (ours - theirs).abs().max() / theirs.abs().max()
            assert off < 1e-4, (path, off)
            assert theirs.abs().max() > 0, path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_hosted_model_says_what_the_model_said(name: str) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    host = HostedModel(model)
    with torch.no_grad():
        found = run(host, SegmentedLora([]), sequences(), slopes()).log_softmax(-1)
        expected = torch.cat(
            [plain(input_ids=one.unsqueeze(0)).logits[0].log_softmax(-1) for one in sequences()]
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "parts", [(TargetKind.ATTENTION, TargetKind.MLP), tuple(TargetKind)], ids=["layers", "all"]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_are_those_of_peft(name: str, parts: tuple[TargetKind, ...]) -> None:
    twins = HostAndPeft(build(name), parts)
    assert_same(twins.run_host(sequences(), slopes()), twins.run_peft(sequences(), slopes()))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_saving_memory_changes_no_number(name: str) -> None:
    twins = HostAndPeft(build(name))
    assert_same(
        twins.run_host(sequences(), slopes(), checkpoint_activations=True),
        twins.run_host(sequences(), slopes()),
    )


def test_saving_memory_keeps_less_for_the_way_back() -> None:
    twins = HostAndPeft(build("qwen3", num_hidden_layers=6))
    assert 3 * kept_bytes(twins, save_memory=True) < kept_bytes(twins, save_memory=False)


def kept_bytes(twins: HostAndPeft, *, save_memory: bool) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    views = twins.layout.views
    gradient = views(torch.zeros_like(twins.weights))
    rows = SegmentedLora([LoraSegment(0, sum(LENGTHS), SCALE, views(twins.weights), gradient)])
    this = ForwardContext(rows, PackedAttention(LENGTHS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        twins.host.hidden_states(
            torch.cat(sequences()), positions(), this, checkpoint_activations=save_memory
        )
    return sum(kept.values())


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_adapters_in_one_pass_are_as_if_each_were_alone(name: str) -> None:
    host = HostedModel(build(name))
    layout = LoraLayout(host.lora_targets, RANK, tuple(TargetKind))
    weights = [trained_weights(layout, seed) for seed in (3, 4)]
    together = [torch.zeros_like(one) for one in weights]
    # The first rows are the base model's, then two adapters, then one that is only asked.
    bounds = [(13, 17), (17, 59), (59, 60)]
    segments = [
        LoraSegment(*bounds[0], SCALE, layout.views(weights[0]), layout.views(together[0])),
        LoraSegment(*bounds[1], SCALE, layout.views(weights[1]), layout.views(together[1])),
        LoraSegment(*bounds[2], SCALE, layout.views(weights[0])),
    ]
    logits = run(host, SegmentedLora(segments), sequences(), slopes())
    for number, ones in enumerate(([1], [2, 3])):
        alone = torch.zeros_like(weights[number])
        start, stop = bounds[number]
        views = layout.views(weights[number]), layout.views(alone)
        rows = SegmentedLora([LoraSegment(0, stop - start, SCALE, *views)])
        own = run(host, rows, [sequences()[one] for one in ones], slopes()[start:stop])
        torch.testing.assert_close(logits[start:stop], own, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(together[number], alone, rtol=1e-3, atol=1e-4)
    base = run(host, SegmentedLora([]), sequences()[:1], slopes()[:13])
    torch.testing.assert_close(logits[:13], base, rtol=1e-4, atol=2e-5)


def test_experts_beside_plain_layers_say_what_the_model_said() -> None:
    model = build("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    plain = copy.deepcopy(model)
    host = HostedModel(model)
    with torch.no_grad():
        found = run(host, SegmentedLora([]), sequences(), slopes())
        expected = torch.cat([plain(input_ids=one.unsqueeze(0)).logits[0] for one in sequences()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    kinds = [bool(site.num_experts) for site in host.lora_targets if site.kind is TargetKind.MLP]
    assert sorted(kinds) == [False, False, True, True, True, True]


def test_routers_are_not_adapted() -> None:
    for name in WITH_EXPERTS:
        paths = [path for site in HostedModel(build(name)).lora_targets for path in site.paths]
        assert not [path for path in paths if path.endswith((".gate", ".router"))]
        assert [path for path in paths if path.endswith("experts.gate_up_proj")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_base_weights_of_16_bits_carry_adapters_of_32(name: str, dtype: torch.dtype) -> None:
    coarse, fine = (
        HostAndPeft(build(name, dtype=dtype)),
        HostAndPeft(build(name, dtype=dtype).float()),
    )
    found = coarse.run_host(sequences(), slopes().to(dtype))
    expected = fine.run_host(sequences(), slopes())
    off = (found.logits.float().log_softmax(-1) - expected.logits.log_softmax(-1)).abs()
    assert off.mean() < 0.05
    for path, pair in found.gradient.items():
        for ours, theirs in zip(pair, expected.gradient[path], strict=True):
            assert ours.dtype == torch.float32
            likeness = torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
            assert likeness > 0.95, (path, likeness)


def test_base_weights_of_16_bits_are_not_held_as_32() -> None:
    gc.collect()
    before = all_tensors()
    host = HostedModel(build("qwen3", dtype=torch.bfloat16))
    gc.collect()
    known = {id(one) for one in before}
    new = [one for one in all_tensors() if id(one) not in known]
    smallest = min(site.in_features * sum(site.out_features) for site in host.lora_targets)
    assert max(one.numel() for one in new if one.dtype == torch.float32) < smallest
    assert max(one.numel() for one in new if one.dtype == torch.bfloat16) >= smallest


def all_tensors() -> list[Tensor]:
    # By type: some modules answer questions about themselves with a warning.
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def test_nothing_of_a_pass_is_held_after_it() -> None:
    for name in ("gpt2", "olmo2", "qwen3", "qwen3_moe"):
        host = HostedModel(build(name))
        this = ForwardContext(SegmentedLora([]), PackedAttention(LENGTHS))
        hidden = host.hidden_states(torch.cat(sequences()), positions(), this)
        refs = [weakref.ref(one) for one in (hidden, this.attention, this.lora)]
        del hidden, this
        gc.collect()
        assert [ref() for ref in refs] == [None, None, None], name


class _Failing(PackedAttention):
    def attend(self, layer: int, *args: Any) -> Tensor:
        if layer == 1:
            raise MemoryError("as if there were none")
        return super().attend(layer, *args)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "qwen3"])
def test_a_pass_that_fails_leaves_nothing_and_the_next_one_works(name: str) -> None:
    twins = HostAndPeft(build(name))
    expected = twins.run_host(sequences(), slopes())
    rows = SegmentedLora([LoraSegment(0, sum(LENGTHS), SCALE, twins.layout.views(twins.weights))])
    attention = _Failing(LENGTHS)
    with pytest.raises(MemoryError):
        twins.host.hidden_states(
            torch.cat(sequences()), positions(), ForwardContext(rows, attention)
        )
    ref = weakref.ref(rows)
    del rows, attention
    gc.collect()
    assert ref() is None
    assert_same(twins.run_host(sequences(), slopes()), expected)


def test_a_pass_that_fails_between_siblings_leaves_nothing() -> None:
    host = HostedModel(build("olmo2"))
    k_proj = host.model.model.layers[1].self_attn.k_proj
    hook = k_proj.register_forward_pre_hook(_fail)
    refs: list[weakref.ref[Tensor]] = []
    first = host.model.model.layers[1].self_attn.q_proj
    other = first.register_forward_hook(lambda _, args, out: refs.append(weakref.ref(args[0])))
    with pytest.raises(MemoryError), torch.no_grad():
        run(host, SegmentedLora([]), sequences(), slopes())
    hook.remove()
    other.remove()
    gc.collect()
    assert [ref() for ref in refs] == [None]


def _fail(*_: object) -> None:
    raise MemoryError("as if there were none")


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (MambaConfig, {"state_size": 4}, "linear_attention|mixes tokens"),
        (BloomConfig, {}, "attends once"),
        (GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8}, "off by"),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, "conv"),
    ],
)
def test_what_mixes_tokens_otherwise_is_refused(
    kind: type[Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be hosted: .*({reason})"):
        HostedModel(build_of(kind, fields))


def test_a_window_that_is_not_obeyed_is_refused() -> None:
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
def test_common_architectures_get_the_fast_modules(name: str) -> None:
    kinds = {type(module) for module in HostedModel(build(name)).model.modules()}
    assert kinds >= {FrozenRMSNorm, FusedGatedMLP, FusedAttention}


def test_a_module_that_says_otherwise_keeps_its_place() -> None:
    model = build("llama")
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda x: 1.01 * plain(x)
    host = HostedModel(model)
    kinds = [type(one.mlp) for one in host.model.model.layers]
    assert kinds == [type(layer.mlp), FusedGatedMLP]
    assert kinds[0] is not FusedGatedMLP


def test_weights_are_not_copied_for_a_tied_head() -> None:
    host = HostedModel(build("qwen3"))
    embedding = host.model.get_input_embeddings().weight
    assert host.lm_head.weight_VD.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_copies_say_the_same_in_any_number_of_rows(name: str) -> None:
    plain, packed = HostedModel(build(name)), HostedModel(build(name), packed_bytes=1 << 30)
    for length in (1, 2, 17, 64, 65):
        one = [torch.arange(length)]
        with torch.no_grad():
            expected = run(plain, SegmentedLora([]), one, slopes(length))
            found = [run(packed, SegmentedLora([]), one, slopes(length)) for _ in range(2)]
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(*found)


def test_packed_copies_stay_within_their_memory() -> None:
    def packed(num_bytes: int) -> int:
        host = HostedModel(build("llama"), packed_bytes=num_bytes)
        groups = {m.group for m in host.model.modules() if isinstance(m, MergedLinearPart)}
        for m in host.model.modules():
            if isinstance(m, FusedAttention):
                groups |= {m.qkv_proj, m.o_proj}
            elif isinstance(m, FusedGatedMLP):
                groups |= {m.gate_up_proj, m.down_proj}
        head = host.lm_head.num_bytes if host.lm_head.has_packed_copy else 0
        return head + sum(one.num_bytes for one in groups if one.has_packed_copy)

    whole = packed(1 << 30)
    assert packed(0) == 0
    assert 0 < packed(whole // 2) <= whole // 2
    assert packed(whole) == whole
