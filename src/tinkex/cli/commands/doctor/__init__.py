"""`tinkex doctor`: check the installation and suggest fixes."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import show


@click.command(cls=Command)
@pass_context
def doctor(context: Context) -> None:
    """Check this installation and suggest fixes.

    Checks the versions, the key, the server, the clock, the home and its disk, and the optional
    libraries. Each check takes at most 5 seconds. Exit code 1 if a check fails; warnings do not
    count as failures.
    """
    from tinkex.cli.commands.doctor.checks import CHECKS
    from tinkex.cli.commands.doctor.runner import DoctorReport, run_checks

    report = DoctorReport(run_checks(CHECKS, context))
    show(context, report)
    if not report.is_healthy:
        click.get_current_context().exit(1)
