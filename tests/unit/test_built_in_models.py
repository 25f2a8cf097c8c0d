"""The included model: available, small, and the default of last resort."""

from __future__ import annotations

import json
import re

import jinja2
import pytest

from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.models.sources import DEFAULT_MODEL, add_built_in_models, choose_default_model
from tinkex.models import TINY, TINY_FOLDER, built_in
from tinkex.pipeline.tiny.tasks import FAMILIES

#: The package index is no place for more.
MAX_BYTES = 8_000_000


def test_included_model_is_complete_and_small() -> None:
    assert built_in() == {TINY: str(TINY_FOLDER)}
    folder = read_model_folder(TINY_FOLDER)
    assert (folder.arch, folder.dtype, folder.has_tokenizer) == (
        "Qwen3ForCausalLM",
        "float16",
        True,
    )
    assert 2_000_000 <= (folder.weights.num_parameters or 0) <= 4_000_000
    assert sum(path.stat().st_size for path in TINY_FOLDER.iterdir()) < MAX_BYTES


def test_model_card_reports_accuracy_per_task() -> None:
    card = (TINY_FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| .+ \| (\d+) \| (\d+) % \|$", card, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(FAMILIES)
    assert all(int(number) > 0 and int(share) <= 100 for _, number, share in rows)
    assert "license: apache-2.0" in card


def test_chat_template_needs_no_variables_but_messages() -> None:
    """lm-eval renders it so, and does not accept undefined variables."""
    template = (TINY_FOLDER / "chat_template.jinja").read_text()
    strict = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(template)
    text = strict.render(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_files_contain_no_local_paths() -> None:
    for path in TINY_FOLDER.glob("*.json"):
        assert "/tmp" not in path.read_text() and "/work" not in path.read_text()
    config = json.loads((TINY_FOLDER / "config.json").read_text())
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("names", "usual"),
    [
        ((TINY,), TINY),
        (("org/mine",), "org/mine"),
        (("org/mine", TINY), "org/mine"),
        (("org/mine", DEFAULT_MODEL, TINY), DEFAULT_MODEL),
        ((DEFAULT_MODEL, TINY), DEFAULT_MODEL),
        (("a", "b", TINY), None),
        ((), None),
    ],
)
def test_included_model_is_the_last_default(names: tuple[str, ...], usual: str | None) -> None:
    assert choose_default_model(names) == usual


def test_added_models_override_the_included_one() -> None:
    assert list(add_built_in_models({"org/mine": "/a"})) == ["org/mine", TINY]
    assert add_built_in_models({TINY: "/another"}) == {TINY: "/another"}
