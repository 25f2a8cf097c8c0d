"""`tinkex completion`: the script that teaches a shell the words of this command."""

from __future__ import annotations

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import PropertiesOutput, show

SHELLS = ("bash", "zsh", "fish")
#: Set by the script when it asks for words.
COMPLETE_VARIABLE = "_TINKEX_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), cls=Argument, summary="The shell that you use.")
@pass_context
def completion(context: Context, shell: str) -> None:
    """Print a script for the completion of a shell.

    It completes commands and options when you press the Tab key. Write it once to where the shell
    looks for it, and start the shell again:

    \b
      tinkex completion bash > ~/.local/share/bash-completion/completions/tinkex
      tinkex completion zsh  > ~/.zfunc/_tinkex
      tinkex completion fish > ~/.config/fish/completions/tinkex.fish

    Make the directory first if it is not there. zsh needs `fpath+=~/.zfunc` in front of `compinit`
    in ~/.zshrc; bash needs the package bash-completion, or `source FILE` in ~/.bashrc.
    """
    script = completion_script(shell)
    if context.is_json:
        show(context, PropertiesOutput({"shell": shell, "script": script}))
    else:
        click.echo(script, nl=False)


def completion_script(shell: str) -> str:
    """The script."""
    from click.shell_completion import ShellComplete, get_completion_class

    from tinkex.cli.main import main

    found = get_completion_class(shell)
    assert found is not None
    # Not the bash class's own version, which starts a bash to look at its version.
    return ShellComplete.source(found(main, {}, "tinkex", COMPLETE_VARIABLE)).strip() + "\n"
