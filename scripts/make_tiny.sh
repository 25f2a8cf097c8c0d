#!/usr/bin/env bash
# Makes tinkex/tiny again: text from templates, pretrain, SFT, DPO, card. -h says more.
# One thread, because the order of sums depends on how many there are.
set -euo pipefail
python="${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m tinkex.pipeline.tiny "$@"
