"""OpenVINO GenAI: reads (prompts, new tokens) as JSON lines, prints the seconds each took.

Runs in the peers' environment, so it imports nothing of this repository.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Answer until standard input ends."""
    path, threads = sys.argv[1:]
    # Compute in float32 with the file's float16 weights, as ours does.
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": int(threads)}
    options |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    pipeline = openvino_genai.LLMPipeline(path, "CPU", **options, ATTENTION_BACKEND="SDPA")
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        prompts, num_new = json.loads(line)
        tokens = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens))
        )
        config = openvino_genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True)
        started = time.perf_counter()
        found = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - started
        assert all(len(row) == num_new for row in found.tokens)
        print(json.dumps({"seconds": seconds, "tokens": found.tokens}), flush=True)


main()
