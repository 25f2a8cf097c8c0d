#!/usr/bin/env bash
# Train tinkex/tiny: generated text, pretrain, SFT, DPO, model card. See -h.
# One thread, because the summation order depends on the number of threads.
set -euo pipefail
python="${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m tinkex.pipeline.tiny "$@"
