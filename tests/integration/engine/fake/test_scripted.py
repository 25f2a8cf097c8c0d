"""Scripted models: they say the texts that prompts set."""

from __future__ import annotations

import functools
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinkex import ServiceClient, text
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.fake.sampler import BigramSampler
from tinkex.engine.fake.scripted import SCRIPTED, ScriptedText, say, scripted_model
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.protocol import SamplerSource
from tinkex.errors import ConfigError, InvalidInput
from tinkex.models import TINY_FOLDER
from tinkex.types import ModelInput, SampleResponse, SamplingParams

END = "<|im_end|>"


@functools.cache
def scripted() -> FakeEngine:
    return FakeEngine([scripted_model()])


def answer(content: str, num_samples: int = 1, **params: Any) -> SampleResponse:
    tokenizer = text.load_tokenizer(str(TINY_FOLDER))
    prompt = text.render_chat(tokenizer, [{"role": "user", "content": content}])
    request = InferenceRequest(
        prompt=ModelInput.from_ints(prompt),
        num_samples=num_samples,
        sampling_params=InferenceParams(**params),
        topk_sample_logprobs=2,
    )
    engine = scripted()
    engine.start_sample("job", SamplerSource(base_model=SCRIPTED), request)
    finished = [each for _ in range(1000) for each in engine.step_samples()]
    assert len(finished) == 1
    assert isinstance(finished[0].outcome, SampleResponse), finished
    return finished[0].outcome


def texts(response: SampleResponse) -> list[str]:
    tokenizer = text.load_tokenizer(str(TINY_FOLDER))
    return [tokenizer.decode(one.tokens) for one in response.sequences]


@pytest.mark.parametrize(
    "said",
    [
        "Hello.",
        "  two spaces, a newline\nand \u00e9\u4e16\U0001f600 ",
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "",
    ],
)
def test_model_says_the_text_and_ends(said: str) -> None:
    response = answer(f"Please answer {say(said)} now.")
    assert texts(response) == [said + END]
    [sequence] = response.sequences
    assert sequence.stop_reason == "stop"
    assert len(sequence.logprobs or ()) == len(sequence.topk_logprobs or ()) > 0


def test_last_script_counts() -> None:
    assert texts(answer(say("one") + say("two"))) == [f"two{END}"]


def test_sequences_take_turns() -> None:
    assert texts(answer(say("a", "b"), 3)) == [f"a{END}", f"b{END}", f"a{END}"]


def test_limits_and_stop_texts_apply() -> None:
    short = answer(say("one two three four"), max_tokens=2)
    assert [len(one.tokens) for one in short.sequences] == [2]
    assert [one.stop_reason for one in short.sequences] == ["length"]
    stopped = answer(say("one two three"), stop_texts=("two",))
    assert texts(stopped)[0].endswith("two")
    assert [one.stop_reason for one in stopped.sequences] == ["stop"]


def test_model_samples_without_a_script() -> None:
    one = answer("Hello", seed=1, max_tokens=20)
    assert one == answer("Hello", seed=1, max_tokens=20)
    assert one != answer("Hello", seed=2, max_tokens=20)


def test_checkpoint_says_it_too() -> None:
    engine = scripted()
    [base] = engine.base_models()
    assert (base.vocab_size, base.tokenizer_folder) == (1536, str(TINY_FOLDER))
    sampler = BigramSampler(engine._get_base(SCRIPTED), ScriptedText(TINY_FOLDER))
    prompt = text.load_tokenizer(str(TINY_FOLDER)).encode(say("x"))
    request = InferenceRequest(
        prompt=ModelInput.from_ints(prompt), sampling_params=InferenceParams()
    )
    assert texts(sampler.sample(request, random.Random(0))) == [f"x{END}"]


def test_folder_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Failed to load tokenizer"):
        FakeEngine([scripted_model(tmp_path)])


def test_server_process_says_it() -> None:
    command = [sys.executable, "-m", "tinkex.testing", "--model", scripted_model()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        with ServiceClient(base_url=url, api_key="tml-a") as service:
            client = service.create_sampling_client(base_model=SCRIPTED)
            tokenizer = client.get_tokenizer()
            prompt = ModelInput.from_ints(tokenizer.encode(say("It works.")))
            response = client.sample(prompt, 1, SamplingParams(max_tokens=20)).result(timeout=60)
        assert tokenizer.decode(response.sequences[0].tokens) == f"It works.{END}"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0


@pytest.mark.parametrize("name", ["", "=3", "a=b", "a=1", "a="])
def test_invalid_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the fake engine takes NAME"):
        FakeEngine([name])
