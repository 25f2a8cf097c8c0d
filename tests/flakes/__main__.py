"""Repeat the tests that start processes, send signals or fill a disk.

python -m tests.flakes [--rounds 30] [--minutes 0] [--jobs 2] [--logs DIR] [PATH ...]

Every third round runs beside a busy process per core. Prints a line per failure, with its log, and
a summary; the status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.flakes.selection import RINGS, ROOT, process_tests

#: A file that takes longer hangs.
MAX_FILE_SECONDS = 1800.0
BUSY_EVERY = 3
BUSY = "while True: pass"
#: Exit codes of pytest: all tests passed, and none was collected.
PASSED = (0, 5)


class Outcome(NamedTuple):
    """One file in one round."""

    failures: list[str]
    log: Path


def main() -> int:
    """Run the rounds; the status is 1 if a test failed."""
    # A shell that starts this in the background has it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parsed()
    files = process_tests(options.paths or RINGS)
    if not files:
        print(f"no test below {' '.join(options.paths)} starts a process", file=sys.stderr)
        return 2
    logs = Path(options.logs or tempfile.mkdtemp(prefix="tinkex-flakes-"))
    ends_at = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")
    print(f"{len(files)} files, {options.rounds} rounds, logs in {logs}", flush=True)
    num_runs = num_failures = 0
    for number in range(1, options.rounds + 1):
        outcomes = run_round(number, files, logs / f"round-{number:02}", options.jobs, ends_at)
        failures = [(each, outcome.log) for outcome in outcomes for each in outcome.failures]
        for failure, log in failures:
            print(f"round {number}: {failure}: {log}", flush=True)
        print(f"round {number}: {len(outcomes)} files, {len(failures)} failures", flush=True)
        num_runs, num_failures = num_runs + len(outcomes), num_failures + len(failures)
        if time.monotonic() > ends_at:
            print(f"the time limit of {options.minutes:g} minutes ended round {number}")
            break
    print(f"{num_runs} runs of {len(files)} files, {num_failures} failures", flush=True)
    return 1 if num_failures else 0


def run_round(
    number: int, files: list[str], folder: Path, num_jobs: int, ends_at: float
) -> list[Outcome]:
    """Run every file once, as far as the time allows."""
    folder.mkdir(parents=True, exist_ok=True)
    with busy_cores(is_busy_round(number)), ThreadPoolExecutor(num_jobs) as pool:
        runs = [pool.submit(run_file, file, folder, ends_at) for file in files]
        try:
            return [outcome for run in runs if (outcome := run.result()) is not None]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.flakes", description=__doc__)
    parser.add_argument("paths", nargs="*", help="Only test files below these.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=0.0, help="Start no file after this.")
    parser.add_argument("--jobs", type=int, default=2, help="Files at the same time.")
    parser.add_argument("--logs", default="", help="Keep the logs in this directory.")
    return parser.parse_args()


def is_busy_round(number: int) -> bool:
    """Whether the machine is kept busy during a round."""
    return number % BUSY_EVERY == 0


@contextmanager
def busy_cores(wanted: bool) -> Iterator[None]:
    """A process per core that computes without a pause."""
    count = os.cpu_count() or 1 if wanted else 0
    hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def run_file(file: str, folder: Path, ends_at: float) -> Outcome | None:
    """Run the tests of a file; None if there is no time left for it."""
    if time.monotonic() > ends_at:
        return None
    log = folder / f"{file.replace('/', '.')}.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", file]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=MAX_FILE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome([f"{file} did not end within {MAX_FILE_SECONDS:g} s"], log)
    if done.returncode in PASSED:
        return Outcome([], log)
    return Outcome(failures_in(log.read_text(errors="replace")) or [f"{file} failed"], log)


def failures_in(text: str) -> list[str]:
    """The tests that the summary of pytest calls failed, in their order."""
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return list(dict.fromkeys(line.partition(" ")[2].partition(" - ")[0] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
