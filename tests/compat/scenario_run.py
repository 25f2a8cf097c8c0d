"""One scenario as an outcome: any error is part of the result, and a hang is a failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

#: No scenario takes this long; one that does has hung.
TIMEOUT_SECONDS = 30


class Absent(Exception):
    """This version of the SDK does not have the feature."""


def outcome(name: str, run: Callable[[], None], seconds: int = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Run one scenario; any error is part of the result."""
    began = time.monotonic()
    status, detail = "pass", ""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        run()
    except Absent as absent:
        status, detail = "absent", str(absent)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the result
        status, detail = "fail", f"{type(error).__name__}: {error}"[:1000]
    finally:
        signal.alarm(0)
    took = round(time.monotonic() - began, 2)
    return {"name": name, "status": status, "detail": detail, "seconds": took}


def give_up(number: int, frame: Any) -> None:
    """Turn a hang into a failure."""
    raise TimeoutError("no answer in time")
