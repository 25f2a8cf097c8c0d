"""Log-probabilities of samples and prompts of tinkex/tiny are those of its forward passes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.sampling_runner import inference_request
from tinkex import text
from tinkex.engine.protocol import AdapterSpec, Pass, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.models import TINY, TINY_FOLDER
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
    SampleRequest,
    SampleResponse,
)
from tinkex.types.sampling import TopkLogprobs

NUM_TOPK = 5


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    made = TorchEngine({TINY: str(TINY_FOLDER)})
    made.create("a", AdapterSpec(base_model=TINY, rank=4, seed=1))
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = text.load_tokenizer(str(TINY_FOLDER))
    question = "What is 3 plus 4? What does a cow say? Which day comes after Monday?"
    return text.render_chat(tokenizer, [{"role": "user", "content": question}])


def forward(engine: TorchEngine, tokens: list[int]) -> np.ndarray:
    """The log-probability of each token but the first."""
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    batch = ForwardBackwardInput([datum], "cross_entropy")
    [output] = engine.run_passes([Pass(adapter_id="a", request=batch, is_forward_only=True)])
    assert isinstance(output, ForwardBackwardOutput), output
    return np.array(output.loss_fn_outputs[0]["logprobs"].tolist())


def sample(engine: TorchEngine, asked: SampleRequest) -> SampleResponse:
    engine.start_sample("job", SamplerSource(base_model=TINY), asked)
    finished = [each for _ in range(1000) for each in engine.step_samples()]
    assert len(finished) == 1
    assert isinstance(finished[0].outcome, SampleResponse), finished
    return finished[0].outcome


def check_topk(tokens: list[int], logprobs: list[float | None], topk: TopkLogprobs | None) -> None:
    """Check that a token among the most likely ones has the very same number there."""
    assert topk is not None
    num_found = 0
    for token, logprob, row in zip(tokens, logprobs, topk.to_rows(), strict=True):
        if row is None:
            continue
        found = dict(row)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        if token in found:
            assert found[token] == logprob
            num_found += 1
        else:
            assert logprob is not None
            assert logprob <= min(found.values())
    assert num_found > len(tokens) / 5


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_echo_agrees_with_forward(engine: TorchEngine, prompt: list[int], num_tokens: int) -> None:
    asked = inference_request(
        prompt,
        max_tokens=max(1, num_tokens),
        is_prompt_only=num_tokens == 0,
        prompt_logprobs=True,
        topk_prompt_logprobs=NUM_TOPK,
        temperature=0.0,
    )
    response = sample(engine, asked)
    scores = response.prompt_logprobs or []
    assert scores[0] is None
    assert np.allclose(scores[1:], forward(engine, prompt), atol=1e-4)
    check_topk(prompt, scores, response.topk_prompt_logprobs_np)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_agree_with_forward(
    engine: TorchEngine, prompt: list[int], temperature: float
) -> None:
    params = {"temperature": temperature, "max_tokens": 60, "stop": []}
    asked = inference_request(prompt, 8, topk_sample_logprobs=NUM_TOPK, seed=1, **params)
    for sequence in sample(engine, asked).sequences:
        wanted = forward(engine, prompt + sequence.tokens)[len(prompt) - 1 :]
        assert np.allclose(sequence.logprobs, wanted, atol=1e-4)
        check_topk(sequence.tokens, sequence.logprobs, sequence.topk_logprobs_np)
        if temperature == 0.0:
            best = sequence.topk_logprobs_np.token_ids[:, 0].tolist()
            assert best == sequence.tokens
