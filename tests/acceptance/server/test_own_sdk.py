"""The tinkex SDK against a real server: sync, async, and interrupted downloads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.acceptance.server.scenario_context import (
    BASE_MODEL,
    HELLO,
    TIMEOUT_SECONDS,
    base_logprobs,
    datum,
    loss_of,
    step,
)
from tests.support.real_server import RealServer, clean_environment, run

PROMPT = tinkex.ModelInput.from_ints([10, 20, 30])
GREEDY = tinkex.SamplingParams(max_tokens=5, temperature=0.0, stop=[])


@pytest.fixture
def key(server: RealServer, request: pytest.FixtureRequest) -> str:
    """The key of a new tenant."""
    return server.new_key(request.node.name)


def scores(sampler: Any) -> list[float]:
    return list(
        sampler.compute_logprobs(tinkex.ModelInput.from_ints(HELLO)).result(TIMEOUT_SECONDS)[1:]
    )


def test_training_sampling_and_resuming(server: RealServer, key: str) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        steps = [step(tinkex, client) for _ in range(5)]
        losses = [loss for loss, _ in steps]
        assert math.isclose(losses[0], -base_logprobs(HELLO).sum(), rel_tol=1e-6)
        assert losses == sorted(losses, reverse=True)
        path = client.save_state("fifth").result(TIMEOUT_SECONDS).path
        ahead = step(tinkex, client)
        resumed = service.create_training_client_from_state_with_optimizer(path)
        assert step(tinkex, resumed) == ahead
        sampler = client.save_weights_and_get_sampling_client()
        assert math.isclose(-sum(scores(sampler)), loss_of(tinkex, client), rel_tol=1e-5)
        first, second = (
            sampler.sample(PROMPT, 1, GREEDY).result(TIMEOUT_SECONDS) for _ in range(2)
        )
        assert first.sequences[0].tokens == second.sequences[0].tokens

        texts = [[index, index + 1, 7] for index in range(30)]
        fresh = service.create_lora_training_client(BASE_MODEL)
        data = [datum(tinkex, text) for text in texts]
        output = fresh.forward_backward(data, "cross_entropy").result(TIMEOUT_SECONDS)
        for text, row in zip(texts, output.loss_fn_outputs, strict=True):
            assert np.allclose(row["logprobs"].to_numpy(), base_logprobs(text), atol=1e-6)

        rest = service.rest_client()
        runs = rest.list_training_runs().result(TIMEOUT_SECONDS)
        assert runs.cursor.total_count == 3
        assert [each.tinker_path for each in checkpoints(rest)] == [path]
        rest.delete_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
        assert checkpoints(rest) == []


def checkpoints(rest: tinkex.RestClient) -> list[Any]:
    return list(rest.list_user_checkpoints().result(TIMEOUT_SECONDS).checkpoints)


def test_training_sampling_and_resuming_async(server: RealServer, key: str) -> None:
    async def work() -> None:
        async with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
            client = await service.create_lora_training_client_async(BASE_MODEL, rank=8)
            passed = await client.forward_backward_async([datum(tinkex, HELLO)], "cross_entropy")
            moved = await client.optim_step_async(tinkex.AdamParams(learning_rate=0.2))
            before = (await passed).metrics["loss:sum"]
            assert (await moved).metrics["step"] == 1.0
            path = (await (await client.save_state_async("first"))).path
            resumed = await service.create_training_client_from_state_async(path)
            output = await (await resumed.forward_async([datum(tinkex, HELLO)], "cross_entropy"))
            assert output.metrics["loss:sum"] < before
            sampler = await client.save_weights_and_get_sampling_client_async()
            drawn = await asyncio.gather(
                *[sampler.sample_async(PROMPT, 1, GREEDY) for _ in range(20)]
            )
            assert len({tuple(each.sequences[0].tokens) for each in drawn}) == 1
            logprobs = await sampler.compute_logprobs_async(tinkex.ModelInput.from_ints(HELLO))
            assert math.isclose(-sum(logprobs[1:]), output.metrics["loss:sum"], rel_tol=1e-5)

    asyncio.run(work())


def test_invalid_request_error_message(server: RealServer, key: str) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        with pytest.raises(tinkex.UnprocessableEntityError, match="99999"):
            client.forward_backward([datum(tinkex, [1, 99_999])], "cross_entropy").result(
                TIMEOUT_SECONDS
            )
        with pytest.raises(tinkex.NotFoundError, match="absent"):
            service.create_sampling_client(model_path=f"tinker://{client.model_id}/weights/absent")
        with pytest.raises(tinkex.BadRequestError, match="no/such-model"):
            service.create_lora_training_client("no/such-model")
        assert loss_of(tinkex, client) > 0.0
    with pytest.raises(tinkex.AuthenticationError):
        tinkex.RestClient(base_url=server.url, api_key="tml-wrong").list_sessions().result(
            TIMEOUT_SECONDS
        )


def test_publishing_twice_is_rejected(server: RealServer, key: str) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        path = service.create_lora_training_client(BASE_MODEL).save_state("one").result().path
        rest = service.rest_client()
        rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
        with pytest.raises(tinkex.ConflictError, match="public already"):
            rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)


# --- downloads --------------------------------------------------------------------------------

CUT_OFF = """
    import os, signal, sys
    import tinkex

    url, key, path, destination = sys.argv[1:]

    def die_halfway(done, total):
        if total and done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    rest = tinkex.RestClient(base_url=url, api_key=key)
    rest.download_checkpoint(path, destination, progress=die_halfway).result()
"""


def test_killed_download_resumes(server: RealServer, key: str, tmp_path: Path) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        step(tinkex, client)
        path = client.save_state("large").result(TIMEOUT_SECONDS).path
        destination = tmp_path / "large"
        command = [sys.executable, "-c", textwrap.dedent(CUT_OFF)]
        arguments = [server.url, key, path, str(destination)]
        run([*command, *arguments], clean_environment(), status=-signal.SIGKILL)
        assert not destination.exists(), "what is not complete is not there"
        before = sum(file.stat().st_size for file in tmp_path.rglob("*.part"))

        reports: list[tuple[int, int | None]] = []
        rest = service.rest_client()
        rest.download_checkpoint(
            path, destination, progress=lambda done, total: reports.append((done, total))
        ).result(TIMEOUT_SECONDS)
        total = reports[-1][0]
        fetched = total - before
        assert 0 < fetched < 0.75 * total, f"{fetched} of {total} bytes were fetched again"
        check_files(destination)
        assert list(tmp_path.iterdir()) == [destination], "nothing is left beside it"
        assert loss_of(tinkex, client) > 0.0


def check_files(directory: Path) -> None:
    """Check that every file of the manifest exists and has the right content."""
    manifest = json.loads((directory / "manifest.json").read_text())["files"]
    assert {"adapter_model.safetensors", "optimizer.safetensors"} <= manifest.keys()
    for name, entry in manifest.items():
        content = (directory / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            entry["size"],
            entry["sha256"],
        )


def test_every_kind_of_checkpoint_is_downloaded(
    server: RealServer, key: str, tmp_path: Path
) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        paths = [
            client.save_state("one").result(TIMEOUT_SECONDS).path,
            client.save_weights_for_sampler("two").result(TIMEOUT_SECONDS).path,
            client.save_weights_external("three").result(TIMEOUT_SECONDS).path,
        ]
        rest = service.rest_client()
        for number, path in enumerate(paths):
            folder = rest.download_checkpoint(path, tmp_path / str(number)).result(TIMEOUT_SECONDS)
            names = {file.name for file in folder.iterdir()}
            assert {"adapter_config.json", "adapter_model.safetensors"} <= names
        with pytest.raises(tinkex.NotFoundError):
            rest.download_checkpoint(paths[0] + "x", tmp_path / "x").result(TIMEOUT_SECONDS)
