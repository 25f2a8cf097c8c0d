"""`tinkex completion`: print a shell completion script."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import PropertiesOutput, show

SHELLS = ("bash", "zsh", "fish")
#: Set by the script when it asks for completions.
COMPLETE_VARIABLE = "_TINKEX_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), cls=Argument, summary="Your shell.")
@pass_context
def completion(context: Context, shell: str) -> None:
    """Print a shell completion script.

    The script completes commands, options and ids when you press Tab. Write it to the directory
    from which your shell loads completions, then restart the shell:

    \b
      tinkex completion bash > ~/.local/share/bash-completion/completions/tinkex
      tinkex completion zsh  > ~/.zfunc/_tinkex
      tinkex completion fish > ~/.config/fish/completions/tinkex.fish

    Create the directory first if it does not exist. zsh needs `fpath+=~/.zfunc` before `compinit`
    in ~/.zshrc; bash needs the package bash-completion, or `source FILE` in ~/.bashrc.
    """
    script = completion_script(shell)
    if context.is_json:
        show(context, PropertiesOutput({"shell": shell, "script": script}))
    else:
        click.echo(script, nl=False)


def completion_script(shell: str) -> str:
    """Return the completion script of a shell."""
    from click.shell_completion import ShellComplete, get_completion_class

    from tinkex.cli.main import main

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    # The source() of the bash class would start bash to check its version.
    return (
        ShellComplete.source(completion_class(main, {}, "tinkex", COMPLETE_VARIABLE)).strip() + "\n"
    )
