"""A whole workflow of an older official SDK; run as a script, with that SDK on the path.

Prints what it saw as JSON, for the test to look at.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
import urllib.request
from typing import Any

import tinker

BASE_MODEL = "tinkex/bigram"
HELLO = list(b"hello hello hello")


def main(url: str, key: str) -> dict[str, Any]:
    """Train, save, go on, sample and fetch."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    models = service.get_server_capabilities().supported_models
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    losses = [step(client)[0] for _ in range(5)]
    path = client.save_state("state").result().path
    ahead = step(client)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    # Batches that come in several chunks, and passes without a gradient.
    many = client.forward([datum(HELLO) for _ in range(9)], "cross_entropy").result()
    best = client.save_weights_for_sampler("best").result().path
    sampler = service.create_sampling_client(model_path=best)
    ephemeral = client.save_weights_and_get_sampling_client()
    rest = service.create_rest_client()
    archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    return {
        "version": tinker.__version__,
        "models": [model.model_name for model in models],
        "losses": losses,
        "is_resumed": step(resumed) == ahead,
        "many": many.metrics["loss:sum"],
        "shapes": [output["logprobs"].shape for output in many.loss_fn_outputs],
        "samples": [draw(sampler), draw(ephemeral)],
        "scores": sampler.compute_logprobs(tinker.ModelInput.from_ints(HELLO)).result(),
        "async_loss": asyncio.run(loss_async(client)),
        "rank": client.get_info().lora_rank,
        "files": files_of(archive.url),
        "runs": [run.training_run_id for run in rest.list_training_runs().result().training_runs],
        "model_id": client.model_id,
        "checkpoints": [
            each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints
        ],
        "refusal": refusal(client),
    }


def datum(tokens: list[int]) -> Any:
    """Predict each token from the one before it."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def step(client: Any) -> tuple[float, float]:
    """The loss before a step, and the step's number."""
    passed = client.forward_backward([datum(HELLO)], "cross_entropy")
    moved = client.optim_step(tinker.AdamParams(learning_rate=0.2))
    return passed.result().metrics["loss:sum"], moved.result().metrics["step"]


async def loss_async(client: Any) -> float:
    """The loss, by the other kind of methods."""
    passed = await client.forward_async([datum(HELLO)], "cross_entropy")
    loss: float = (await passed).metrics["loss:sum"]
    return loss


def draw(sampler: Any) -> list[list[int]]:
    """Two samples of one seed."""
    prompt = tinker.ModelInput.from_ints(list(b"he"))
    params = tinker.SamplingParams(max_tokens=8, seed=1, temperature=0.5)
    response = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    return [list(sequence.tokens) for sequence in response.sequences]


def files_of(url: str) -> dict[str, int]:
    """What is in an archive, and how large it is."""
    with urllib.request.urlopen(url, timeout=30) as response:
        content = io.BytesIO(response.read())
    with tarfile.open(fileobj=content) as archive:
        return {member.name: member.size for member in archive if member.isfile()}


def refusal(client: Any) -> str:
    """What the SDK says when the user did something wrong."""
    try:
        client.forward_backward([datum(HELLO)], "no_such_loss").result()
    except (tinker.TinkerError, ValueError) as error:  # ValueError: the SDK checks it, until 0.24
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
