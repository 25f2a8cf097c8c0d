"""Run inside the cookbook's environment: fetch an adapter, convert it, merge it into its base."""

from __future__ import annotations

import sys
from pathlib import Path

import tinker
from tinker_cookbook import weights

MODEL = "Qwen/Qwen3-4B-Instruct-2507"


def download(tinker_path: str, folder: str) -> None:
    """Fetch the adapter of a training checkpoint."""
    adapter = weights.download(tinker_path=tinker_path, output_dir=folder)
    assert (Path(adapter) / "adapter_model.safetensors").stat().st_size > 0


def build(tinker_path: str, folder: str) -> None:
    """Export the adapter, convert it for PEFT, and merge it into its base."""
    client = tinker.ServiceClient().create_training_client_from_state(tinker_path)
    exported = client.save_weights_external("exported").result().path
    download(exported, f"{folder}/adapter")
    files = {"base_model": MODEL, "adapter_path": f"{folder}/adapter"}
    weights.build_lora_adapter(**files, output_path=f"{folder}/lora")
    weights.build_hf_model(**files, output_path=f"{folder}/merged", dtype="float32")
    assert any(Path(folder, "merged").glob("*.safetensors"))


if __name__ == "__main__":
    {"download": download, "build": build}[sys.argv[1]](*sys.argv[2:])
