#!/usr/bin/env bash
# The whole pipeline: tokenizer, pretrain, SFT, DPO and, with --run-r1, reasoning. -h says more.
# All of it is in tinkex.pipeline.run; this only finds the Python to run it with.
# VENV_DIR names its environment (.venv of the project); NO_VENV=1 takes python3 as it is.
set -euo pipefail
project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${VENV_DIR:-$project/.venv}/bin/python"
if [[ "${NO_VENV:-0}" == 1 || ! -x "$python" ]]; then
  python="$(command -v python3 || true)"
fi
if [[ -z "$python" ]] || ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tinkex") is None)'; then
  echo "Error: no Python with tinkex in it was found (looked at ${VENV_DIR:-$project/.venv} and python3)." >&2
  echo "Run: python3 -m venv .venv && .venv/bin/pip install -e '.[pipeline]'" >&2
  exit 1
fi
exec "$python" -m tinkex.pipeline.run "$@"
