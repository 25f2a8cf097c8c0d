#!/usr/bin/env bash
# All checks and tests, fastest first; prints the duration of each. VENV names the environment to use, RINGS=all includes tests
# that are marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
slow=(-m "not slow")
[ "${RINGS:-}" = all ] && slow=()
run() { local start=$SECONDS; printf '\n== %s\n' "$*"; "$@"; printf -- '-- %d s\n' $((SECONDS - start)); }

# Meanwhile, rewrite and compile the tests once: otherwise every test process would do so at its start.
"$bin/python" -m pytest --collect-only -qq >/dev/null 2>&1 &
compiling=$!

run "$bin/ruff" check src tests trainer examples benchmarks docs
run "$bin/ruff" format --check src tests trainer examples benchmarks docs
run "$bin/mypy"
run "$bin/lint-imports" --no-cache
run "$bin/deptry" src
wait "$compiling" || true
# Four processes on two cores, file by file: tests mostly wait for a process or a socket. Files run in directory order:
# sorted by their number of tests, files with few long tests would run last and leave the others idle.
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE run "$bin/python" -m pytest -n 4 --dist loadfile \
  --no-loadscope-reorder ${slow[@]+"${slow[@]}"} "$@"
