#!/usr/bin/env bash
# The whole gate, in the order that fails fastest. VENV names the environment to use.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
run() { printf '\n== %s\n' "$*"; "$@"; }

run "$bin/ruff" check src tests trainer examples benchmarks docs
run "$bin/ruff" format --check src tests trainer examples benchmarks docs
run "$bin/mypy"
run "$bin/lint-imports" --no-cache
run "$bin/deptry" src
# Two at a time, file by file: most of a test's time is waiting for a process or a socket. In the
# order of the directories: sorted by their number of tests, the files with few long tests come last,
# and one of the two has nothing to do meanwhile.
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE run "$bin/python" -m pytest -n 2 --dist loadfile \
  --no-loadscope-reorder "$@"
