"""`tinkex doctor`: results, advice and timeouts of checks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from tinkex.cli.commands.doctor import checks
from tinkex.cli.commands.doctor.runner import Check, CheckResult, DoctorReport, run_checks
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import run
from tinkex.errors import ConfigError
from tinkex.installation import install_command

LATE = CheckResult("warn", "too late")
FINE = Check("fine", lambda context: CheckResult("ok", "good"), LATE)
BAD = Check("bad", lambda context: CheckResult("fail", "broken", "Mend it."), LATE)


def test_hanging_check_times_out() -> None:
    never = threading.Event()
    stuck = Check("stuck", lambda context: CheckResult("ok", str(never.wait())), LATE)
    found = run_checks([stuck, FINE], Context(), seconds=0.05)
    never.set()
    assert found[0] == ("stuck", LATE)


def test_expected_errors_become_results_and_bugs_are_raised() -> None:
    def refuse(context: Context) -> CheckResult:
        raise ConfigError("wrong", hint="Write it right.")

    def break_disk(context: Context) -> CheckResult:
        raise PermissionError(13, "Permission denied", "/x")

    found = run_checks([Check("a", refuse, LATE), Check("b", break_disk, LATE)], Context())
    assert found[0][1] == CheckResult("fail", "wrong", "Write it right.")
    assert found[1][1].status == "fail"
    with pytest.raises(ZeroDivisionError):
        run_checks([Check("c", lambda context: 1 // 0, LATE)], Context())  # type: ignore[arg-type, return-value]


def test_the_command_exits_1_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (FINE, BAD))
    assert run(["doctor"]).exit_code == 1
    assert capsys.readouterr().out == (
        "ok    fine  good\nfail  bad   broken\n            -> Mend it.\n1 check failed.\n"
    )
    assert run(["doctor", "--json"]).exit_code == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], [row["status"] for row in found["checks"]]) == (False, ["ok", "fail"])
    monkeypatch.setattr(checks, "CHECKS", (FINE,))
    assert run(["doctor"]).exit_code == 0


def test_colors_only_on_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    report = DoctorReport([("fine", CheckResult("warn", "so so"))])
    report.print(screen=Screen(is_terminal=True, is_colored=True))
    assert "\x1b[33mwarn" in capsys.readouterr().out
    report.print(screen=Screen())
    assert capsys.readouterr().out == "warn  fine  so so\nReady, with 1 warning.\n"
    assert DoctorReport([("fine", CheckResult("ok", ""))]).title() == "All checks passed."


# --- this machine -----------------------------------------------------------------------------


def test_missing_libraries_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert checks.check_torch(Context()).status == "warn"
    for look, extras in (
        (checks.check_transformers, ("text",)),
        (checks.check_server_libraries, ("server", "torch")),
    ):
        found = look(Context())
        assert found.status == "warn"
        assert install_command(*extras) in (found.advice or "")
    assert checks.check_kernels(Context()).status == "ok"


def test_broken_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "run_python", lambda code: (1, "ImportError: libx.so"))
    found = checks.check_torch(Context())
    assert (found.status, "libx.so" in found.message) == ("fail", True)
    kernels = checks.check_kernels(Context())
    assert (kernels.status, "C compiler" in (kernels.advice or "")) == ("warn", True)
    monkeypatch.setattr(checks, "run_python", lambda code: (0, "yes"))
    assert checks.check_kernels(Context()).status == "ok"


class Usage(NamedTuple):
    free: int


def test_home_check_rates_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "not" / "there"))
    for free, status in ((10**12, "ok"), (10**9, "warn"), (10**6, "fail")):
        monkeypatch.setattr("shutil.disk_usage", lambda place, free=free: Usage(free))
        assert checks.check_home(Context()).status == status
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "file" / "home"))
    found = checks.check_home(Context())
    assert (found.status, "TINKEX_HOME" in (found.advice or "")) == ("fail", True)


def test_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_python(Context()).status == "ok"
    monkeypatch.setattr(checks, "MIN_PYTHON", (99, 0))
    assert checks.check_python(Context()).status == "fail"


# --- the clock --------------------------------------------------------------------------------


@pytest.mark.parametrize(("skew", "status"), [(0, "ok"), (59, "ok"), (-61, "warn"), (3600, "warn")])
def test_clock_skew_is_rated(skew: float, status: str) -> None:
    assert checks.check_clock_skew(skew).status == status


def test_unset_clock_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert checks.check_clock(Context()).status == "fail"
