"""Recipes on a real server with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.recipes.conftest import losses, make_plan, start
from tests.support.engine_server import LocalServer
from tests.support.tiny_model_folders import save_tiny
from tinkex import ServiceClient

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """URL, key and model folder of a deterministic server."""
    directory = tmp_path_factory.mktemp("real")
    folder = save_tiny(directory / "tiny", vocab_size=259)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    server = LocalServer(directory / "home", {"tiny": folder}, deterministic="true")
    try:
        yield server.ready(), server.new_key("recipes"), folder
    finally:
        server.end()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_real_model_learns_and_resumes(
    kind: str, real: tuple[str, str, Path], tmp_path: Path
) -> None:
    url, key, folder = real
    plan = make_plan(tmp_path, kind, base_model="tiny", epochs=6, learning_rate=0.02, rank=8)
    with ServiceClient(
        base_url=url, api_key=key, tokenizer_loader=lambda _: load(folder)
    ) as service:
        undisturbed = start(plan, service, tmp_path / "undisturbed")
        found = [report.loss for report in undisturbed]
        assert fmean(found[-2:]) < 0.8 * fmean(found[:2])
        stopped = start(plan, service, tmp_path / "run")
        for report in stopped:
            if report.step == 5:
                stopped.stop()
        again = start(plan, service, tmp_path / "run")
        assert [report.step for report in again] == list(range(7, 13))
        assert losses(again) == pytest.approx(losses(undisturbed), abs=1e-5)


def load(folder: Path) -> object:
    """Load the tokenizer of the model folder with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
