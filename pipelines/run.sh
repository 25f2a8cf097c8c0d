#!/usr/bin/env bash
# Run the pipeline: tokenizer, pretrain, SFT, DPO and, with --run-r1, reasoning. See -h.
# Finds a Python with tinkex and starts tinkex.pipeline.run.
# VENV_DIR: virtual environment (default: .venv of the project); NO_VENV=1: use python3.
set -euo pipefail
project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${VENV_DIR:-$project/.venv}/bin/python"
if [[ "${NO_VENV:-0}" == 1 || ! -x "$python" ]]; then
  python="$(command -v python3 || true)"
fi
if [[ -z "$python" ]] || ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tinkex") is None)'; then
  echo "Error: no Python with tinkex found in ${VENV_DIR:-$project/.venv} or python3." >&2
  echo "Run: python3 -m venv .venv && .venv/bin/pip install -e '.[pipeline]'" >&2
  exit 1
fi
exec "$python" -m tinkex.pipeline.run "$@"
