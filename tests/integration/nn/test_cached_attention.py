"""Attention over what is kept equals attention over everything at once."""

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
KIND = KVCacheSpec([KVShape(KEYS, WIDTH, WIDTH)], torch.float32, torch.device("cpu"))
HOWS = [
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


def _whole(rows: tuple[Tensor, Tensor, Tensor], how: AttentionOptions) -> Tensor:
    return causal_attention(*(x.unsqueeze(0) for x in rows), how)[0].transpose(0, 1)  # type: ignore[arg-type]


def _cut(rows: tuple[Tensor, Tensor, Tensor], at: slice) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x[:, at] for x in rows)  # type: ignore[return-value]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cuts", [[23], [1, 22], [9, 1, 8, 5]])
def test_a_prompt_read_in_pieces_equals_one_read_at_once(
    how: AttentionOptions, cuts: list[int]
) -> None:
    rows = _rows(23, 0)
    stored, outs, start = PromptKV(KIND, 23), [], 0
    for size in cuts:
        part = PrefillRows(stored, start, start + size)
        attention = CachedAttention([part])
        outs.append(attention.attend(0, *_cut(rows, slice(start, start + size)), how))
        start += size
    assert torch.allclose(torch.cat(outs), _whole(rows, how), atol=1e-5)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("prompts", [[12, 12, 12], [3, 12, 17]])
def test_samples_step_by_step_equal_all_at_once(
    how: AttentionOptions, is_shared: bool, prompts: list[int]
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
    block = KVBlock(KIND, 3, 64)
    shared = None
    for slot, (rows, length) in enumerate(zip(sequences, prompts, strict=True)):
        stored = PromptKV(KIND, length)
        PrefillRows(stored, 0, length).attend(0, *_cut(rows, slice(0, length)), how)
        if is_shared:
            shared = stored
        else:
            block.load_prompt(slot, stored, length)
    lengths = np.array([0 if is_shared else length for length in prompts])
    for step in range(10):
        new = [
            _cut(rows, slice(length + step, length + step + 1))
            for rows, length in zip(sequences, prompts, strict=True)
        ]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*new, strict=True))
        out = DecodeRows(block, lengths + step, shared).attend(0, q, k, v, how)
        for row, (rows, length) in enumerate(zip(sequences, prompts, strict=True)):
            wanted = _whole(_cut(rows, slice(0, length + step + 1)), how)[-1]
            assert torch.allclose(out[row], wanted, atol=1e-5), (step, row)


def test_what_a_slot_held_before_is_gone() -> None:
    block = KVBlock(KIND, 2, 8)
    for tensor in (*block.keys, *block.values):
        tensor.fill_(float("nan"))
    stored = PromptKV(KIND, 3)
    for tensor in (*stored.keys, *stored.values):
        tensor.fill_(1.0)
    block.load_prompt(0, stored, 3)
    block.copy_slot(1, block, 0)
    larger = KVBlock(KIND, 1, 16)
    larger.keys[0].fill_(float("nan"))
    larger.copy_slot(0, block, 1)
    assert float(block.keys[0].sum()) == 2 * 3 * KEYS * WIDTH
    assert float(larger.keys[0].sum()) == 3 * KEYS * WIDTH


def test_resizing_slots_keeps_active_kv() -> None:
    block = KVBlock(KIND, 2, 8)
    block.keys[0][:] = torch.arange(2.0)[:, None, None, None]
    block.resize(5, 2)
    assert block.keys[0][:, 0, 0, 0].tolist() == [0, 1, 0, 0, 0]
    block.resize(1, 1)
    assert block.num_bytes == 8 * KIND.token_bytes
