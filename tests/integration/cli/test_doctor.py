"""`tinkex doctor`: a check that hangs is ended."""

from __future__ import annotations

from tinkex.cli.commands.doctor import checks


def test_timeout_kills_python_and_its_children() -> None:
    assert checks.run_python("print('a'); print('b')") == (0, "b")
    assert checks.run_python("raise SystemExit(3)")[0] == 3
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    assert checks.run_python(code, seconds=0.2) == (-1, "took longer than 0.2 seconds")
