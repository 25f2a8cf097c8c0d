"""`tinkex doctor`: checks of an installation, each on its own."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show


@click.command(cls=Command)
@pass_context
def doctor(context: Context) -> None:
    """Check this installation, and say what to do.

    Looks at the versions, the key, the server, the clock, the home and its disk, and at the
    libraries that some commands need. No check takes longer than 5 seconds. Exit code 1 if one
    fails; a warning is no failure.
    """
    from tinkex.cli.commands.doctor.checks import CHECKS
    from tinkex.cli.commands.doctor.runner import DoctorReport, run_checks

    report = DoctorReport(run_checks(CHECKS, context))
    show(context, report)
    if not report.is_healthy:
        click.get_current_context().exit(1)
