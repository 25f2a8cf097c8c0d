"""Norms, turning and gating by our own kernels say what their formulas say, row by row."""

from __future__ import annotations

import pytest
import torch

from tinkex.nn.ops import inference_kernels


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (1, 5, 576), (700, 64)])
def test_rows_are_normed(shape: tuple[int, ...]) -> None:
    x, scale = drawn(*shape), drawn(shape[-1], seed=1)
    wide = x.double()
    wanted = wide / (wide.square().sum(-1, keepdim=True) + 0.5).sqrt() * scale.double()
    found = inference_kernels.rms_norm_forward(x, scale, 0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        found[..., -1:, :],
        inference_kernels.rms_norm_forward(x[..., -1:, :].contiguous(), scale, 0.5),
    )


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_heads_are_turned_by_their_rows_angles(num_rows: int, has_norm: bool) -> None:
    x, scale = drawn(num_rows, 5, 32), drawn(3, 32, seed=1)
    angles = drawn(num_rows, 16, seed=2).double()
    sides = torch.complex(*x.double().chunk(2, dim=-1))[:, :3]
    if has_norm:
        sizes = (sides.abs().square().sum(-1, keepdim=True) + 0.25).sqrt()
        halves = [part / sizes for part in (sides.real, sides.imag)]
        weights = scale.double().chunk(2, dim=-1)
        sides = torch.complex(
            *(part * weight for part, weight in zip(halves, weights, strict=True))
        )
    turned = sides * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)
    left_alone = x[:, 3:].clone()
    norm = (scale, 0.25) if has_norm else None
    inference_kernels.rotary_inplace(x, 3, norm, (cos.float(), sin.float()))
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(x[:, :3].double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(x[:, 3:], left_alone)


def test_gates_are_silu_at_any_size() -> None:
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 100.0, -100.0] * 2)
    up = drawn(16)
    found = inference_kernels.swiglu_rows(torch.cat((gate, up)).unsqueeze(0))[0]
    wanted = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-35)
    many = drawn(300, 2 * 64, seed=1)
    parts = many.double().chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(parts[0]) * parts[1]
    torch.testing.assert_close(
        inference_kernels.swiglu_rows(many).double(), wanted, rtol=1e-5, atol=1e-7
    )


def test_nan_propagates() -> None:
    bad = torch.full((1, 16), float("nan"))
    assert inference_kernels.swiglu_rows(bad).isnan().all()
    assert inference_kernels.rms_norm_forward(bad, torch.ones(16), 1.0).isnan().all()


def test_only_what_the_kernels_can_read_is_suited() -> None:
    fine = drawn(4, 16)
    assert inference_kernels.can_use_kernels(fine, fine[:2])
    assert not inference_kernels.can_use_kernels(fine.bfloat16())
    assert not inference_kernels.can_use_kernels(fine[:, :12]), "rows must lie behind each other"
    assert not inference_kernels.can_use_kernels(drawn(4, 12)), "eight numbers are taken at a time"
