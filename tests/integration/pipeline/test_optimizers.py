"""Optimizers: orthogonalization, parameter groups and state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.integration.pipeline.tiny_stage import TinyModel
from tinkex.errors import CheckpointError
from tinkex.nn.muon import orthogonalize
from tinkex.pipeline.optimizers import Muon, make_optimizer, split_parameters
from tinkex.pipeline.settings_sources import make_settings
from tinkex.pipeline.train_settings import TrainSettings


def plan(**changes: object) -> TrainSettings:
    paths = {"out_dir": "out", "data_path": "data.jsonl"}
    return make_settings("pretrain", paths | changes)


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32), (3, 32, 48)])
def test_orthogonalize_singular_values(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    # The smallest singular values of a square matrix converge more slowly.
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6
    assert float(values.min()) > 0.1 * min(1.0, float(torch.linalg.svdvals(matrix).min()) * 8)


def test_orthogonalize_improves_with_more_steps() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-3]))
    few = torch.linalg.svdvals(orthogonalize(matrix, 2)).min()
    many = torch.linalg.svdvals(orthogonalize(matrix, 10)).min()
    assert few < 0.1
    assert many > 0.6


def test_orthogonalize_keeps_singular_vectors() -> None:
    left, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(2)))
    right, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))
    found = orthogonalize(left @ torch.diag(torch.linspace(0.5, 2.0, 16)) @ right)
    core = left.T @ found @ right.T
    assert torch.allclose(core, torch.diag(core.diagonal()), atol=1e-4)
    assert bool(((core.diagonal() > 0.6) & (core.diagonal() < 1.3)).all())


def test_muon_scales_the_update_of_a_tall_matrix() -> None:
    tall = nn.Parameter(torch.zeros(64, 16))
    optimizer = Muon([tall], lr=0.02)
    tall.grad = 1e-6 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    values = torch.linalg.svdvals(tall.detach()) / 0.02
    # Twice the size, for four times as many rows as columns.
    assert float(values.min()) > 1.2
    assert float(values.max()) < 2.6


def test_muon_trains_only_hidden_matrices() -> None:
    model = TinyModel(8)
    hidden, outer, vectors = split_parameters(model)
    assert [id(value) for value in hidden] == [id(model.hidden.weight)]
    assert [id(value) for value in outer] == [id(model.embed.weight)]
    assert {id(value) for value in vectors} == {
        id(model.hidden.bias),
        id(model.norm.weight),
        id(model.norm.bias),
    }


def test_frozen_weights_are_skipped() -> None:
    model = TinyModel(8)
    model.hidden.weight.requires_grad_(False)
    assert all(
        value is not model.hidden.weight for value in make_optimizer(model, plan()).parameters
    )


def test_weight_decay_applies_only_to_matrices() -> None:
    groups = make_optimizer(TinyModel(8), plan(weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [{value.dim() for value in group["params"]} for group in groups] == [{2}, {1}]


def test_every_group_has_its_own_peak_rate() -> None:
    optimizer = make_optimizer(
        TinyModel(8), plan(optimizer="muon", learning_rate=0.001, muon_lr=0.02)
    )
    optimizer.set_lr_factor(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005, 0.0005, 0.01]


def test_state_of_another_optimizer_is_rejected() -> None:
    saved = make_optimizer(TinyModel(8), plan(optimizer="muon")).state_dict()
    with pytest.raises(CheckpointError, match=r"adamw\+muon, this run has adamw"):
        make_optimizer(TinyModel(8), plan()).load_state_dict(saved)


def test_state_of_another_shape_is_rejected() -> None:
    model = TinyModel(8)
    optimizer = make_optimizer(model, plan())
    for value in optimizer.parameters:
        value.grad = torch.ones_like(value)
    optimizer.step()
    with pytest.raises(CheckpointError, match="shape"):
        make_optimizer(TinyModel(16), plan()).load_state_dict(optimizer.state_dict())
