"""A downloaded adapter: whether it is one, what it is for, and which of its files others need."""

from __future__ import annotations

import json
from pathlib import Path

from tinkex.cli.errors import CliError

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
#: What a server keeps beside an adapter for itself.
SERVER_FILE_NAMES = (
    "manifest.json",
    "tinkex.json",
    "trainer_state.json",
    "optimizer.safetensors",
    "checkpoint_complete",
)
MODEL_CARD_NAME = "README.md"


def check_adapter(folder: Path, path: str) -> None:
    """Refuse what PEFT could not load."""
    if any(folder.glob("*.age")):
        raise CliError(
            f"{path} is encrypted",
            "Run `tinkex checkpoint download --identity FILE` with it, and export that folder.",
        )
    has_weights = any((folder / name).is_file() for name in ADAPTER_WEIGHTS_NAMES)
    if not has_weights or not (folder / ADAPTER_CONFIG_NAME).is_file():
        raise CliError(
            f"{path} holds no PEFT adapter",
            f"Expected {ADAPTER_CONFIG_NAME} and {ADAPTER_WEIGHTS_NAMES[0]} in it.",
        )


def read_base_model(folder: Path) -> str | None:
    """The model an adapter was trained on, as its own settings name it."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG_NAME).read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found else None


def write_model_card(folder: Path, path: str, repo_id: str) -> None:
    """Write the page that the hub shows, unless the checkpoint brought one."""
    place = folder / MODEL_CARD_NAME
    if not place.exists():
        place.write_text(format_model_card(folder, path, repo_id), encoding="utf-8")


def format_model_card(folder: Path, path: str, repo_id: str) -> str:
    """The hub's page of an adapter: what it is, where it is from, how it is used."""
    base = read_base_model(folder) or "unknown"
    rank = _read_rank(folder)
    # Quoted as JSON, which YAML reads too: a name may hold anything.
    lines = [
        "---",
        *([f"base_model: {json.dumps(base)}"] if base != "unknown" else []),
        "library_name: peft",
        "tags:",
        "- lora",
        "- peft",
        "- tinker",
        f"tinker_path: {json.dumps(path)}",
        "---",
        "",
        f"# LoRA adapter for {base}",
        "",
        f"Trained through the Tinker API. Source: `{path}`",
        "",
        f"- Base model: {base}",
        *([f"- LoRA rank: {rank}"] if rank else []),
        "",
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(base)})",
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})",
        f"model = PeftModel.from_pretrained(base, {json.dumps(repo_id)})",
        "```",
        "",
    ]
    return "\n".join(lines)


def _read_rank(folder: Path) -> int | None:
    try:
        rank = json.loads((folder / ADAPTER_CONFIG_NAME).read_bytes())["r"]
    except (ValueError, KeyError, TypeError):
        return None
    return rank if isinstance(rank, int) else None
