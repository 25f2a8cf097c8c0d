"""Run inside the cookbook's environment: fetch an adapter, convert it, merge it into its base.

PEFT or transformers then loads the result, which has to give the server's log-probabilities.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import tinker
import torch
from peft import PeftModel
from tinker import types
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

#: The same weights; the first has tied embeddings, the second a tensor for its output layer.
TIED = "Qwen/Qwen3-4B-Instruct-2507"
UNTIED = "Qwen/Qwen3-8B"
TOKENS = list(range(100, 140))
#: Merged weights are rounded to the precision of the base, which is float16.
TOLERANCE = 1e-2


def download(folder: str, tinker_path: str) -> None:
    """Fetch the adapter of a checkpoint."""
    adapter = weights.download(tinker_path=tinker_path, output_dir=folder)
    assert (Path(adapter) / "adapter_model.safetensors").stat().st_size > 0


def convert(folder: str) -> None:
    """Convert an export for PEFT."""
    expected = export(TIED, f"{folder}/adapter")
    weights.build_lora_adapter(
        base_model=TIED, adapter_path=f"{folder}/adapter", output_path=f"{folder}/converted"
    )
    check(PeftModel.from_pretrained(loaded(TIED), f"{folder}/converted"), expected)


def merge(model: str, folder: str, **which: bool) -> None:
    """Train, export and merge; the merged model has to be the trained one."""
    expected = export(model, f"{folder}/adapter", **which)
    weights.build_hf_model(
        base_model=model, adapter_path=f"{folder}/adapter", output_path=f"{folder}/merged"
    )
    check(loaded(f"{folder}/merged"), expected)


def export(model: str, folder: str, **which: bool) -> list[Any]:
    """Train a little, export the result, and return the log-probabilities that it gives."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=model, rank=8, **which)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = client.save_weights_and_get_sampling_client()
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    path = client.save_weights_external("exported").result().path
    download(folder, path)
    return list(expected)


def loaded(place: str) -> Any:
    """A model of transformers, in full precision."""
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)


def check(model: Any, expected: list[Any]) -> None:
    """The model gives each token the log-probability that the server gives it."""
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    rows = torch.log_softmax(logits[:-1], -1)
    found = rows.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    difference = float((found - torch.tensor(expected[1:])).abs().max())
    assert difference < TOLERANCE, f"log-probabilities differ by up to {difference}"


KINDS = {
    "download": download,
    "convert": convert,
    "merge_body": partial(merge, TIED, train_unembed=False),
    "merge_untied": partial(merge, UNTIED),
    "merge_tied": partial(merge, TIED),
}
if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
