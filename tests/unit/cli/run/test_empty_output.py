"""The hint on stderr for samples without text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkex.cli.commands.run.sample import PromptInput, SampleArguments, _request_samples
from tinkex.cli.commands.sampling_options import SampleSource, SamplingOptions
from tinkex.testing import ToyTokenizer
from tinkex.types import SampledSequence, SampleResponse


def drawn(text: str, *, as_chat: bool) -> None:
    tokenizer = ToyTokenizer()
    tokens = np.array(tokenizer.encode(text), np.int32)
    sequence = SampledSequence("stop", "s", tokens)
    response = SampleResponse(sequences=[sequence])
    sampler: Any = SimpleNamespace(
        _load_tokenizer=lambda **_: tokenizer,
        sample=lambda *_, **__: SimpleNamespace(result=lambda: response),
    )
    drawing = SamplingOptions(max_tokens=8, temperature=1.0, top_k=-1, top_p=1.0)
    ask = SampleArguments(num_samples=1, tokenizer=None, as_chat=as_chat, with_logprobs=False)
    _request_samples(sampler, SampleSource("m"), PromptInput(text="Hello"), drawing, ask)


def test_empty_output_suggests_chat(capsys: pytest.CaptureFixture[str]) -> None:
    drawn("", as_chat=False)
    said = capsys.readouterr().err
    assert "produced no text" in said
    assert "--chat" in said


def test_empty_chat_output_does_not_suggest_chat(capsys: pytest.CaptureFixture[str]) -> None:
    drawn("", as_chat=True)
    said = capsys.readouterr().err
    assert "produced no text" in said
    assert "--chat" not in said


def test_output_with_text_has_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    drawn("Hi", as_chat=False)
    assert "produced no text" not in capsys.readouterr().err
