"""Log output of a process without configuration."""

from __future__ import annotations

import subprocess
import sys


def test_warnings_are_shown_without_configuration() -> None:
    script = (
        "from tinkex.logs import get_logger; log = get_logger('tinkex.client.ordered_queue');"
        "log.info('quiet'); log.warning('still trying')"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert shown.stderr.decode().strip() == "still trying"
