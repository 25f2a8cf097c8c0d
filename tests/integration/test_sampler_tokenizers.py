"""Which tokenizer a sampling client loads: the one the server names, else what the name tells."""

from __future__ import annotations

import pytest

from tests.integration.conftest import KEY, Connect, Serve
from tinkex.engine.fake.toy_tokenizer import ToyTokenizer
from tinkex.testing import Fault

LLAMA = "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ({"tokenizer_id": "/models/mine"}, "/models/mine"),
    ],
)
def test_the_server_knows_best(
    told: dict[str, str], wanted: str, serve: Serve, connect: Connect
) -> None:
    loaded: list[str] = []

    def load(name: str) -> ToyTokenizer:
        loaded.append(name)
        return ToyTokenizer()

    server = serve(api_keys={KEY}, models=(LLAMA,))
    service = connect(server, tokenizer_loader=load)
    sampler = service.create_sampling_client(base_model=LLAMA)
    body = {"sampler_id": sampler.sampling_session_id, "base_model": LLAMA, **told}
    server.inject("get_sampler", Fault(status=200, body=body), times=None)

    assert isinstance(sampler.get_tokenizer(), ToyTokenizer)
    assert loaded == [wanted]
    assert sampler.get_base_model() == LLAMA
