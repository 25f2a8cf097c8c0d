"""`tinkex config`: show the settings and their origin."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Group
from tinkex.cli.output import Column, PropertiesOutput, TableOutput, show


@click.group(cls=Group)
def config() -> None:
    """Show the settings and their origin."""


@config.command("show")
@pass_context
def show_settings(context: Context) -> None:
    """List every setting with its value and origin; keys are masked.

    Order of precedence: command-line option, profile given with --profile, environment variable,
    default profile, built-in default.
    """
    from tinkex.cli.commands.setting_origins import resolve_settings
    from tinkex.client.profiles import read_profiles
    from tinkex.home import Home

    settings, environment = resolve_settings(context)
    file = read_profiles(Home(environment.home).profiles_file)
    # The title already contains the path of the file.
    rows = [
        {
            "name": row.name,
            "value": row.display_value(),
            "source": row.source.replace(f" in {file.path}", ""),
        }
        for row in settings
    ]
    data = {
        "settings": [row.to_dict() for row in settings],
        "path": file.path,
        "profiles": sorted(file.profiles),
        "default_profile": file.default,
    }
    profiles = ", ".join(sorted(file.profiles)) or "none"
    columns = {"name": Column("Setting"), "value": Column("Value"), "source": Column("From")}
    show(context, TableOutput(rows, columns, f"Profiles in {file.path}: {profiles}", data))


@config.command()
@pass_context
def path(context: Context) -> None:
    """Print the path of the profiles file."""
    from tinkex.home import Home
    from tinkex.settings import read_environment

    environment = read_environment()
    file = Home(environment.home).profiles_file
    if not context.is_json:
        click.echo(file)
        return
    data = {
        "path": file,
        "exists": file.is_file(),
        "home": environment.home,
        "credentials": environment.credentials_file,
    }
    show(context, PropertiesOutput(data))
