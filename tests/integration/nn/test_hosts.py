from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.integration.nn.architectures import ARCHITECTURES, VOCAB_SIZE, build
from tests.integration.nn.peft_twin import Answer, Twins, run
from tinkex.nn.host import Host
from tinkex.nn.segments import Segments
from tinkex.nn.sites import Part

LENGTHS = (13, 4, 21, 21, 1)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=dice) for length in lengths]


def slopes(num_rows: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


def assert_same(found: Answer, expected: Answer) -> None:
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
    host = Host(model)
    with torch.no_grad():
        found = run(host, Segments([]), sequences(), slopes()).log_softmax(-1)
        expected = torch.cat(
            [plain(input_ids=one.unsqueeze(0)).logits[0].log_softmax(-1) for one in sequences()]
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("parts", [(Part.ATTENTION, Part.MLP), tuple(Part)], ids=["layers", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_are_those_of_peft(name: str, parts: tuple[Part, ...]) -> None:
    twins = Twins(build(name), parts)
    assert_same(twins.run_host(sequences(), slopes()), twins.run_peft(sequences(), slopes()))
