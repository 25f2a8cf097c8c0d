"""A process that speaks the protocol of `engine/vllm/serve.py`, with the bigram model of tests.

python fake_vllm.py DESCRIPTOR      behaviour and log are given by environment variables
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tinkex import types
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.sampler import BigramSampler
from tinkex.engine.fake.storage import read_model
from tinkex.engine.fake.toy_tokenizer import VOCAB_SIZE

#: Samples of this length are never answered.
ENDLESS_TOKENS = 999
#: A rank that the fake cannot load although the bridge would.
MAX_RANK = 64
Frame = dict[str, Any]


def write_python(folder: Path, **environment: str) -> Path:
    """Write an executable that takes the place of vLLM's Python."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    variables = " ".join(f"{name}='{value}'" for name, value in environment.items())
    python.write_text(f'#!/bin/sh\n{variables} exec "{sys.executable}" "{__file__}" "$2"\n')
    python.chmod(0o755)
    return python


class FakeVllm:
    """Answers frames; every received one is written to the log."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self._log = os.environ.get("FAKE_VLLM_LOG")
        self._base = BigramSampler(Bigram.base("tinkex/bigram", VOCAB_SIZE))
        #: Added to all log-probabilities.
        self._offset = float(os.environ.get("FAKE_VLLM_OFFSET", "0"))

    def run(self) -> None:
        self._read()
        if reason := os.environ.get("FAKE_VLLM_FAILURE"):
            self._write({"type": "failed", "error": reason})
            return
        ready = {"version": "fake", "max_context_tokens": 256, "vocab_size": VOCAB_SIZE}
        self._write({"type": "ready", "max_lora_rank": MAX_RANK, "eos_tokens": [256], **ready})
        while (frame := self._read()) is not None:
            if frame["type"] == "sample" and frame["params"]["max_tokens"] != ENDLESS_TOKENS:
                self._write({"id": frame["id"], **self._answer(frame)})

    def _answer(self, frame: Frame) -> Frame:
        adapter = frame["adapter"]
        if adapter is not None and "rejected" in adapter["path"]:
            return {"type": "declined", "error": "no such module"}
        sampler = self._base
        if adapter is not None:
            sampler = BigramSampler(read_model(Path(adapter["path"]), VOCAB_SIZE))
        params = frame["params"]
        request = types.SampleRequest(
            num_samples=params["n"],
            prompt=types.ModelInput.from_ints(frame["prompt"]),
            sampling_params=types.SamplingParams(
                max_tokens=params["max_tokens"],
                seed=params["seed"],
                temperature=params["temperature"],
                stop=params["stop"] or params["stop_token_ids"],
            ),
            topk_sample_logprobs=params["logprobs"],
            prompt_logprobs=params["prompt_logprobs"] is not None,
            topk_prompt_logprobs=params["prompt_logprobs"] or 0,
        )
        response = sampler.sample(request, random.Random(0))
        sequences = [
            {
                "tokens": _bytes(sequence.tokens_np, np.int32),
                "logprobs": _bytes(np.asarray(sequence.logprobs) + self._offset, np.float32),
                "topk": _topk(sequence.topk_logprobs_np),
                "stop_reason": sequence.stop_reason,
            }
            for sequence in response.sequences
        ]
        answer: Frame = {"type": "done", "sequences": sequences, "num_cached_tokens": 0}
        if response.prompt_logprobs_np is not None:
            answer["prompt_logprobs"] = _bytes(response.prompt_logprobs_np, np.float32)
            answer["prompt_topk"] = _topk(response.topk_prompt_logprobs_np)
        return answer

    def _read(self) -> Frame | None:
        length = int.from_bytes(self._file.read(4), "big")
        if not length:
            return None
        frame: Frame = msgspec.msgpack.decode(self._file.read(length))
        if self._log is not None:
            with Path(self._log).open("a") as log:
                log.write(json.dumps(frame) + "\n")
        return frame

    def _write(self, frame: Frame) -> None:
        body = msgspec.msgpack.encode(frame)
        self._connection.sendall(len(body).to_bytes(4, "big") + body)


def _bytes(values: Any, dtype: type) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def _topk(topk: Any) -> list[bytes] | None:
    if topk is None:
        return None
    return [_bytes(topk.token_ids, np.int32), _bytes(topk.logprobs, np.float32)]


if __name__ == "__main__":
    FakeVllm(socket.socket(fileno=int(sys.argv[1]))).run()
