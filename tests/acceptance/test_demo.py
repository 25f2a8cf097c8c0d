"""`make demo` without its minutes: all of its steps, its end by Ctrl-C, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.serve_process import TIMEOUT_SECONDS
from tinkex.home import Home
from tinkex.server_discovery import find_lock_holder

ROOT = Path(__file__).parents[2]
#: Nothing of whoever runs the tests, and no package index.
ENVIRONMENT = {
    name: text for name, text in os.environ.items() if not name.startswith(("TINKE", "PIP_"))
} | {"PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}


def start(home: Path, *options: str) -> subprocess.Popen[str]:
    words = [str(ROOT / "examples" / "demo.py"), "--folder", str(home), *options]
    return subprocess.Popen(
        [sys.executable, *words],
        env=ENVIRONMENT,
        cwd=home.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_without_an_index_the_demo_goes_all_the_way_with_the_model_of_the_package(
    tmp_path: Path,
) -> None:
    home = tmp_path / "demo"
    process = start(home)
    printed, said = process.communicate(timeout=3 * TIMEOUT_SECONDS)
    assert process.returncode == 0, said
    assert "SmolLM2 is not available here, so tinkex/tiny is used" in said
    # Questions that are not in the rows get answers in the style of the rows.
    before, after = said.split("4 Train on")
    assert "matey" not in before.lower().partition("\n1 ")[2]
    assert re.search(r"[123] of 3 answers are a pirate's", after)
    agreed = re.search(r"tokens agree with the server's to (\S+)\n", after)
    assert agreed is not None and float(agreed[1]) < 1e-3
    assert "tinkex checkpoint list" in after and "sampler" in after
    [chat] = [line.strip() for line in after.splitlines() if "tinkex chat tinker://" in line]
    assert "tinkex train sft" in after
    # Plain text: nothing that only a terminal understands.
    assert "\x1b" not in said and "\r" not in said
    assert (Path(printed.strip()) / "adapter_model.safetensors").is_file()
    assert find_lock_holder(Home(home)) is None
    # What is printed works as it is printed, although `tinkex` is not on the search path.
    typed = f"set -e; echo 'What is 5 plus 3?' | {chat}; {chat.partition(' chat ')[0]} serve stop"
    again = subprocess.run(
        ["sh", "-c", typed],
        env=ENVIRONMENT | {"PATH": "/usr/bin:/bin"},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "matey" in again.stdout.lower()


def test_ctrl_c_in_the_middle_ends_with_130_and_a_sentence_and_no_server(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    process = start(home, "--model", "tinkex/tiny", "--steps", "100000")
    assert process.stderr is not None
    for line in process.stderr:
        if "step 1/100000" in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    _, said = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, said
    assert said.rstrip().endswith("Interrupted: the server is stopped. Run it again to start over.")
    assert "Traceback" not in said
    assert find_lock_holder(Home(home)) is None
