"""Kill the processes of a cluster at random while the official SDK trains and samples.

python -m tests.kills [--kills 200] [--seed 1] [--workers 2] [--ray] [--engine fake] [--logs DIR]

A round trains and samples several models. The first round is undisturbed; every later one must give
the same losses, samples and checkpoint bytes, and every operation must have run once. Prints a line
per round and a summary; the status is 1 if a round differs.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from tests.kills.client import NUM_OPERATIONS
from tests.kills.cluster import KEY, TIMEOUT_SECONDS, Cluster, RayWorkers

BASE_MODELS = {"fake": "tinkex/bigram", "local": "tinkex/tiny"}
#: A kill comes up to this long after a training step.
MAX_DELAY_SECONDS = 0.3


class Client:
    """The process that trains; its lines arrive in a queue."""

    def __init__(self, cluster: Cluster, base_model: str, log: Path) -> None:
        env = {"TINKER_BASE_URL": cluster.url, "TINKER_API_KEY": KEY}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kills.client", base_model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def start_round(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def next_line(self) -> str:
        """Return `step`, or the results as JSON."""
        line = self._lines.get(timeout=2 * TIMEOUT_SECONDS).strip()
        if not line:
            raise RuntimeError("the client has ended; see client.log")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class KillRun:
    """Rounds of training among kills."""

    def __init__(self, cluster: Cluster, client: Client, rng: random.Random) -> None:
        self._cluster, self._client, self._rng = cluster, client, rng
        self.num_kills: collections.Counter[str] = collections.Counter()

    def run_round(self, number: int, max_kills: int) -> list[dict[str, Any]]:
        """Run one round with at most this many kills and return its results."""
        self._client.start_round(number)
        num_kills = 0
        while (line := self._client.next_line()) == "step":
            if num_kills < max_kills:
                num_kills += 1
                self._kill()
        return list(json.loads(line))

    def _kill(self) -> None:
        faults = self._cluster.faults
        weights = [weight for weight, _ in faults.values()]
        [name] = self._rng.choices(list(faults), weights)
        time.sleep(self._rng.random() * MAX_DELAY_SECONDS)
        self.num_kills[name] += 1
        faults[name][1](self._rng)


def check_operations(store: str, results: list[dict[str, Any]]) -> list[str]:
    """Return a sentence per model whose operations did not run exactly once."""
    run_ids = [result["path"].removeprefix("tinker://").partition("/")[0] for result in results]
    query = (
        "SELECT count(*), count(DISTINCT job_id) FROM steps"
        " WHERE run_id = %s AND kind IN ('forward_backward', 'optim_step')"
    )
    problems = []
    with psycopg.connect(store) as db:
        for run_id in run_ids:
            found = db.execute(query, [run_id]).fetchone()
            if found != (NUM_OPERATIONS, NUM_OPERATIONS):
                problems.append(f"{run_id}: {found} operations instead of {NUM_OPERATIONS}")
    return problems


def without_paths(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != "path"} for one in results]


def run_all(run: KillRun, cluster: Cluster, num_kills: int) -> int:
    """Run rounds until there were enough kills; returns the number of rounds that differ."""
    reference = without_paths(run.run_round(0, 0))
    num_bad = number = 0
    while (left := num_kills - run.num_kills.total()) > 0:
        number += 1
        started = time.monotonic()
        results = run.run_round(number, left)
        problems = check_operations(cluster.store, results)
        if without_paths(results) != reference:
            problems.append("other results than without kills")
        num_bad += bool(problems)
        seconds = time.monotonic() - started
        done = f"{run.num_kills.total()}/{num_kills} kills"
        print(f"round {number}: {seconds:.1f} s, {done}; {problems or 'equal'}", flush=True)
    return num_bad


def main() -> int:
    """Run the kills; the status is 1 if a round differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ray", action="store_true", help="run the workers on a Ray cluster")
    parser.add_argument("--engine", choices=sorted(BASE_MODELS), default="fake")
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="tinkex-kills-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs in {logs}", flush=True)
    kind = RayWorkers if options.ray else Cluster
    cluster = kind(logs, options.engine, options.workers)
    client = Client(cluster, BASE_MODELS[options.engine], logs / "client.log")
    run = KillRun(cluster, client, random.Random(options.seed))
    started = time.monotonic()
    try:
        num_bad = run_all(run, cluster, options.kills)
    finally:
        client.close()
        cluster.close()
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(run.num_kills.items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{run.num_kills.total()} kills ({kinds}) in {minutes:.1f} min, {num_bad} rounds differ")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
