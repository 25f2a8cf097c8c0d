"""A tenant that makes high-rank models in a loop: memory and disk of a server, against one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import Row, at_most

BASE_MODEL = "tinkex/tiny"
RANK = 512
NUM_MODELS = 60
#: Room for two or three models in training.
ADAPTER_BYTES = 600_000_000
#: 60 models may take so many times the memory and the disk of one.
LIMIT = 3.0


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for models that are created and never trained."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks limits", description=__doc__)
    parser.add_argument("--workers", default="1", help="workers of the server")
    workers = parser.parse_args(list(options)).workers
    many, one = (measure(count, workers) for count in (NUM_MODELS, 1))
    name = f"{NUM_MODELS} models of rank {RANK} against 1"
    return [
        at_most(f"{name}: memory of the server", many[0], one[0], "MB", LIMIT),
        at_most("  disk of the server after its end", many[1], one[1], "MB", LIMIT),
    ]


def measure(num_models: int, workers: str) -> tuple[float, float]:
    """The memory of a server with so many models, and its disk after it ended, in megabytes."""
    from tinkex import ServiceClient

    with tempfile.TemporaryDirectory() as home:
        with server(Path(home), workers) as (process, url):
            service = ServiceClient(base_url=url, api_key=(Path(home) / "key").read_text().strip())
            for _ in range(num_models):
                service.create_lora_training_client(BASE_MODEL, rank=RANK)
            memory = sum(map(rss_bytes, family(process.pid)))
        files = (path for path in Path(home).rglob("*") if path.is_file())
        return memory / 1e6, sum(path.stat().st_size for path in files) / 1e6


@contextmanager
def server(home: Path, workers: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a small memory budget, until the block ends."""
    port = 8000 + os.getpid() % 20_000
    settings = {
        "TINKEX_HOME": str(home),
        "TINKEX_ADAPTER_BYTES": str(ADAPTER_BYTES),
        "TINKEX_THREADS": "1",
        "TINKEX_WORKERS": workers,
    }
    command = [sys.executable, "-m", "tinkex", "serve", "--port", str(port)]
    process = subprocess.Popen(
        command, env=os.environ | settings, text=True, stderr=subprocess.DEVNULL
    )
    try:
        yield process, wait_until_ready(process, home, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(120)


def wait_until_ready(process: subprocess.Popen[str], home: Path, url: str) -> str:
    """The URL, once the server answers and its worker has announced its models."""
    from tinkex import ServiceClient
    from tinkex.errors import TinkexError

    for _ in range(120):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            client = ServiceClient(base_url=url, api_key=(home / "key").read_text().strip())
            if client.get_server_capabilities().supported_models:
                return url
        except (TinkexError, OSError):
            pass
        time.sleep(1.0)
    raise RuntimeError("the server did not become ready within 120 seconds")


def family(pid: int) -> list[int]:
    """A process and everything that it started."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += family(int(child))
    return found


def rss_bytes(pid: int) -> int:
    """The memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
