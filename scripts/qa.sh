#!/usr/bin/env bash
# All checks and tests; prints the duration of each. VENV names the environment to use, RINGS=all includes tests that are marked
# slow, TEST_PROCESSES is the number of test processes. mypy runs beside the tests: if it fails, its errors are printed at once
# and again at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
slow=(-m "not slow")
[ "${RINGS:-}" = all ] && slow=()
run() {
  local start=$SECONDS status=0
  printf '\n== %s\n' "$*"
  "$@" || status=$?
  printf -- '-- %d s\n' $((SECONDS - start))
  return "$status"
}

# The tests start more than a thousand Python processes; without bytecode files, each would compile the package.
unset PYTHONDONTWRITEBYTECODE

types=$(mktemp)
trap 'rm -f "$types"' EXIT
(run "$bin/mypy" >"$types" 2>&1 || { cat "$types"; exit 1; }) &
checking=$!
# Rewrite and compile the tests once: otherwise every test process would do so at its start.
"$bin/python" -m pytest --collect-only -qq >/dev/null 2>&1 &
compiling=$!

run "$bin/ruff" check src tests trainer examples benchmarks docs
run "$bin/ruff" format --check src tests trainer examples benchmarks docs
run "$bin/lint-imports" --no-cache
run "$bin/deptry" src
wait "$compiling" || true

# Four processes on two cores, file by file: tests mostly wait for a process or a socket. Files run in directory order:
# sorted by their number of tests, files with few long tests would run last and leave the others idle.
status=0
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE run "$bin/python" -m pytest -n "${TEST_PROCESSES:-4}" --dist loadfile \
  --no-loadscope-reorder ${slow[@]+"${slow[@]}"} "$@" || status=$?
wait "$checking" || status=1
cat "$types"
exit "$status"
