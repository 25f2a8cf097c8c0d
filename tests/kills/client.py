"""The client of a kill run: trains and samples with the official SDK, in a process of its own.

Reads the number of a round from each line of standard input. Writes `step` to standard output after
every training step, and at the end of the round its results as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tinker

import tinkex

NUM_MODELS = 3
NUM_STEPS = 12
SAMPLE_EVERY = 4
#: Steps and operations of one model in a round, as the store counts them.
NUM_OPERATIONS = 2 * NUM_STEPS
_OUTPUT = threading.Lock()


def emit(line: str) -> None:
    with _OUTPUT:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def datum(model: int, step: int) -> tinker.Datum:
    tokens = [(model * 11 + step * 7 + offset) % 60 + 3 for offset in range(17)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 16},
    )


def train(service: tinker.ServiceClient, base_model: str, model: int) -> dict[str, Any]:
    """Train one model and return everything that a client sees of it."""
    training = service.create_lora_training_client(base_model=base_model, rank=4, seed=model)
    losses, samples = [], []
    for step in range(NUM_STEPS):
        passed = training.forward_backward([datum(model, step)], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        losses.append(passed.result().metrics["loss:sum"])
        if step % SAMPLE_EVERY == SAMPLE_EVERY - 1:
            sampler = training.save_weights_and_get_sampling_client()
            params = tinker.SamplingParams(max_tokens=8, seed=step)
            prompt = tinker.ModelInput.from_ints([3, 4, 5])
            output = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
            samples.append([list(sequence.tokens) for sequence in output.sequences])
        emit("step")
    path = training.save_state("end").result().path
    return {"losses": losses, "samples": samples, "digest": digest_of(path), "path": path}


def digest_of(path: str) -> str:
    """Return a digest of the tensors of a checkpoint; the official SDK cannot download one."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "checkpoint"
        tinkex.RestClient().download_checkpoint(path, target).result()
        for file in sorted(target.rglob("*.safetensors")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    base_model = sys.argv[1]
    service = tinker.ServiceClient()
    for _ in sys.stdin:
        with ThreadPoolExecutor(NUM_MODELS) as threads:
            models = range(1, NUM_MODELS + 1)
            results = list(threads.map(lambda one: train(service, base_model, one), models))
        emit(json.dumps(results))


if __name__ == "__main__":
    main()
