"""Values can be built by many threads at once, also for the first time."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import sys
import threading

from tinkex.types.base import Value

sys.setswitchinterval(1e-6)
NAMES = [f"field_{number}" for number in range(30)]


def new_kind(number):
    inside = type(Value)("Inside", (Value,), {"__annotations__": dict.fromkeys(NAMES, int)})
    fields = {"inside": inside | None, **dict.fromkeys(NAMES, str)}
    return type(Value)("Outside", (Value,), {"__annotations__": fields, "inside": None})


def build(kind, barrier):
    barrier.wait()
    kind(**dict.fromkeys(NAMES, "text"))


for number in range(200):
    kind, barrier = new_kind(number), threading.Barrier(4)
    threads = [threading.Thread(target=build, args=(kind, barrier)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_new_type_is_built_by_many_threads_at_once() -> None:
    """Run in a subprocess, because a failure crashes the interpreter."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
