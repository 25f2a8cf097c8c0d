from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tinkex.nn.cached_attention import CachedAttention, DecodeRows, PrefillRows
from tinkex.nn.forward_context import AttentionOptions
from tinkex.nn.kv_cache import KVBlock, KVCacheSpec, KVShape, PromptKV
from tinkex.nn.packed_attention import causal_attention

HEADS, KEYS, WIDTH = 6, 2, 8
SPEC = KVCacheSpec([KVShape(KEYS, WIDTH, WIDTH)], torch.float32, torch.device("cpu"))
OPTIONS = [
    AttentionOptions(0.3),
    AttentionOptions(0.3, window=5),
    AttentionOptions(0.3, softcap=2.0),
    AttentionOptions(0.3, 7, 2.0),
]


def _rows(num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(heads, num, WIDTH, generator=rng) for heads in (HEADS, KEYS, KEYS)
    )


def _full_attention(rows: tuple[Tensor, Tensor, Tensor], options: AttentionOptions) -> Tensor:
    return causal_attention(*(x.unsqueeze(0) for x in rows), options)[0].transpose(0, 1)  # type: ignore[arg-type]


def _slice_rows(rows: tuple[Tensor, Tensor, Tensor], at: slice) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x[:, at] for x in rows)  # type: ignore[return-value]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [[23], [1, 22], [9, 1, 8, 5]])
def test_chunked_prefill_equals_full_prefill(options: AttentionOptions, sizes: list[int]) -> None:
    rows = _rows(23, 0)
    prompt, outs, start = PromptKV(SPEC, 23), [], 0
    for size in sizes:
        part = PrefillRows(prompt, start, start + size)
        attention = CachedAttention([part])
        outs.append(attention.attend(0, *_slice_rows(rows, slice(start, start + size)), options))
        start += size
    assert torch.allclose(torch.cat(outs), _full_attention(rows, options), atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("prompts", [[12, 12, 12], [3, 12, 17]])
def test_decode_steps_equal_full_forward(
    options: AttentionOptions, is_shared: bool, prompts: list[int]
) -> None:
    if is_shared and len(set(prompts)) > 1:
        prompts = prompts[:1] * 3
    sequences = [_rows(30, 0 if is_shared else seed) for seed in range(3)]
    if is_shared:
        own = [_rows(30, 10 + seed) for seed in range(3)]
        sequences = [
            tuple(  # type: ignore[misc]
                torch.cat([a[:, : prompts[0]], b[:, prompts[0] :]], dim=1)
                for a, b in zip(sequences[0], mine, strict=True)
            )
            for mine in own
        ]
    block = KVBlock(SPEC, 3, 64)
    shared = None
    for slot, (rows, length) in enumerate(zip(sequences, prompts, strict=True)):
        prompt = PromptKV(SPEC, length)
        PrefillRows(prompt, 0, length).attend(0, *_slice_rows(rows, slice(0, length)), options)
        if is_shared:
            shared = prompt
        else:
            block.load_prompt(slot, prompt, length)
    lengths = np.array([0 if is_shared else length for length in prompts])
    for step in range(10):
        new = [
            _slice_rows(rows, slice(length + step, length + step + 1))
            for rows, length in zip(sequences, prompts, strict=True)
        ]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*new, strict=True))
        out = DecodeRows(block, lengths + step, shared).attend(0, q, k, v, options)
        for row, (rows, length) in enumerate(zip(sequences, prompts, strict=True)):
            expected = _full_attention(_slice_rows(rows, slice(0, length + step + 1)), options)[-1]
            assert torch.allclose(out[row], expected, atol=1e-5), (step, row)


def test_reused_slot_is_cleared() -> None:
    block = KVBlock(SPEC, 2, 8)
    for tensor in (*block.keys, *block.values):
        tensor.fill_(float("nan"))
    prompt = PromptKV(SPEC, 3)
    for tensor in (*prompt.keys, *prompt.values):
        tensor.fill_(1.0)
    block.load_prompt(0, prompt, 3)
    block.copy_slot(1, block, 0)
    larger = KVBlock(SPEC, 1, 16)
    larger.keys[0].fill_(float("nan"))
    larger.copy_slot(0, block, 1)
    assert float(block.keys[0].sum()) == 2 * 3 * KEYS * WIDTH
    assert float(larger.keys[0].sum()) == 3 * KEYS * WIDTH


def test_resizing_slots_keeps_active_kv() -> None:
    block = KVBlock(SPEC, 2, 8)
    block.keys[0][:] = torch.arange(2.0)[:, None, None, None]
    block.resize(5, 2)
    assert block.keys[0][:, 0, 0, 0].tolist() == [0, 1, 0, 0, 0]
    block.resize(1, 1)
    assert block.num_bytes == 8 * SPEC.token_bytes
