"""Run inside the cookbook's environment: fetch an adapter, convert it, merge it into its base."""

from __future__ import annotations

import sys
from pathlib import Path

from tinker_cookbook import weights

MODEL = "Qwen/Qwen3-4B-Instruct-2507"


def main(tinker_path: str, folder: str) -> None:
    """Each step reads what the one before it wrote."""
    adapter = weights.download(tinker_path=tinker_path, output_dir=f"{folder}/adapter")
    assert (Path(adapter) / "adapter_model.safetensors").stat().st_size > 0
    weights.build_lora_adapter(base_model=MODEL, adapter_path=adapter, output_path=f"{folder}/lora")
    weights.build_hf_model(
        base_model=MODEL, adapter_path=adapter, output_path=f"{folder}/merged", dtype="float32"
    )
    assert any(Path(folder, "merged").glob("*.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
