"""A working example of every command, and the server and files it needs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from tests.integration.cli.conftest import CliResult, RunCli, SeededServer
from tests.integration.conftest import BASE_MODEL, KEY
from tests.integration.recipes.conftest import KINDS, write_data
from tests.support.byte_tokenizer_cli import make_service
from tests.support.fake_hub import TOKEN, FakeHub
from tests.support.model_folder_files import write_folder
from tests.support.pipeline_project import PipelineProject as Pipeline
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import main

SMALL = f"--base-model {BASE_MODEL} --steps 1 --batch-size 2 --run-dir {{dir}}/run"
LOGIN = "auth login --api-key-stdin --base-url {url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A command line; names in braces are filled in from the ExampleStage."""

    words: str
    before: str = ""
    """A command that must run first."""
    stdin: str = ""
    exit_code: int = 0
    is_lines: bool = False
    """Whether it prints one JSON document per line."""
    is_local: bool = False
    """Whether it works without an API server."""
    is_verdict: bool = False
    """Whether it reports a state: a negative answer is a result, not an error."""


def local(words: str, *, before: str = "", exit_code: int = 0, is_verdict: bool = False) -> Example:
    """An example of a local command."""
    return Example(
        words=words, before=before, exit_code=exit_code, is_local=True, is_verdict=is_verdict
    )


#: Examples by command; `test_every_command_has_an_example` checks that none is missing.
EXAMPLES: dict[str, Example] = {
    "auth login": Example(words=LOGIN, stdin=KEY),
    "auth logout": Example(words="auth logout", before=LOGIN, stdin=KEY, is_local=True),
    "auth status": Example(words="auth status", is_verdict=True),
    "auth whoami": Example(words="auth whoami"),
    "billing checkpoint-storage": Example(words="billing checkpoint-storage"),
    "billing usage": Example(words="billing usage {start} {end}"),
    "chat": Example(words="chat --max-tokens 4", stdin="hello\nand you?\n", is_lines=True),
    "checkpoint alias": Example(words="checkpoint alias {sampler} pirate"),
    "checkpoint copy": Example(words="checkpoint copy {training}"),
    "checkpoint create": Example(
        words=f"checkpoint create --base-model {BASE_MODEL} --output {{dir}}/made.json"
    ),
    "checkpoint delete": Example(words="checkpoint delete {training} --yes"),
    "checkpoint download": Example(words="checkpoint download {training} -o {dir}/here"),
    "checkpoint export": Example(words="checkpoint export {training} -o {dir}/adapter"),
    "checkpoint info": Example(words="checkpoint info {sampler}"),
    "checkpoint list": Example(words="checkpoint list"),
    "checkpoint publish": Example(words="checkpoint publish {training}"),
    "checkpoint push-hf": Example(words="checkpoint push-hf {training} -r anna/mine"),
    "checkpoint set-ttl": Example(words="checkpoint set-ttl {training} --ttl 2h"),
    "checkpoint unpublish": Example(words="checkpoint unpublish {training}"),
    "cluster status": local("cluster status"),
    "completion": local("completion bash"),
    "config path": local("config path"),
    "config show": local("config show"),
    "doctor": Example(words="doctor", is_verdict=True),
    "key create": local("key create --name mine"),
    "key list": local("key list", before="key create"),
    "key quota": local("key quota --models 5", before="key create"),
    "key revoke": local("key revoke 1", before="key create"),
    "model add": local("model add mine {folder}"),
    "model info": local("model info mine", before="model add mine {folder}"),
    "model list": Example(words="model list"),
    "model remove": local("model remove mine", before="model add mine {folder}"),
    "pipeline clean": local("pipeline clean --yes", before="pipeline run"),
    "pipeline plot": local("pipeline plot sft", before="pipeline run"),
    "pipeline run": local("pipeline run"),
    "pipeline status": local("pipeline status", before="pipeline run"),
    "run info": Example(words="run info {run}"),
    "run list": Example(words="run list"),
    "run plot": Example(words="run plot {run}"),
    "run rename": Example(words="run rename {run} first-try"),
    "run sample": Example(words="run sample --prompt hello --max-tokens 4"),
    "run watch": Example(words="run watch {run} --once"),
    "sample": Example(words="sample --prompt hello --max-tokens 4"),
    "serve logs": local("serve logs"),
    "serve status": local("serve status", exit_code=1, is_verdict=True),
    "serve stop": local("serve stop", exit_code=1, is_verdict=True),
    "session export-trace": Example(words="session export-trace {session} -o {dir}/trace"),
    "session finish": Example(words="session finish {session}"),
    "session info": Example(words="session info {session}"),
    "session list": Example(words="session list"),
    **{f"train {kind}": Example(words=f"train {kind} {{{kind}}} {SMALL}") for kind in KINDS},
    "train rl": Example(
        words=f"train rl {{rl}} {SMALL} --reward {{dir}}/judge.py:reward --group-size 2"
        " --answer-tokens 2"
    ),
    "usage": Example(words="usage"),
    "usage storage": Example(words="usage storage"),
    "usage tokens": Example(words="usage tokens"),
    "version": local("version"),
}


#: Commands whose examples another example cannot follow on the same server.
REMOVING = {"checkpoint delete", "session finish"}


def all_commands(group: click.Command = main, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Return the paths of all commands, including groups that run without a subcommand."""
    if not isinstance(group, click.Group) or group.invoke_without_command:
        yield " ".join(names)
    if not isinstance(group, click.Group):
        return
    context = click.Context(group, help_option_names=["-h", "--help"])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from all_commands(command, (*names, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A server with one resource of each kind, and a directory with input files."""

    seeded: SeededServer
    tinkex: RunCli
    directory: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def session_id(self) -> str:
        return next(iter(self.seeded.server.sessions))

    def fill(self, words: str) -> list[str]:
        """Split a command line and fill in its placeholders."""
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        names = {
            "url": self.seeded.server.url,
            "dir": self.directory,
            "run": self.seeded.run_ids[1],
            "training": self.seeded.training,
            "sampler": self.seeded.sampler,
            "session": self.session_id,
            "folder": self.directory / "folder",
            "start": (hour - timedelta(hours=1)).isoformat().replace("+00:00", "Z"),
            "end": (hour + timedelta(hours=1)).isoformat().replace("+00:00", "Z"),
            **{kind: self.directory / f"{kind}.jsonl" for kind in KINDS},
        }
        return [re.sub(r"\{(\w+)\}", lambda found: str(names[found[1]]), w) for w in words.split()]

    def run(self, *words: str, stdin: str = "", is_person: bool = False) -> CliResult:
        """Run a command line with a text on stdin."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        screen = Screen(width=200)
        context = Context(make_service=make_service, stdout=screen, is_stdin_terminal=is_person)
        return self.tinkex(*words, context=context)

    def prepare(self, example: Example) -> list[str]:
        """Run what an example needs first, and return its arguments."""
        if example.before:
            result = self.run(*self.fill(example.before), stdin=example.stdin)
            assert result.exit_code == 0, result.err
        return self.fill(example.words)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest,
    tinkex: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Stage]:
    """Commands that remove what the others need get a server of their own."""
    from huggingface_hub import constants

    is_alone = request.node.callspec.params.get("name") in REMOVING
    seeded = request.getfixturevalue("own_seeded" if is_alone else "shared_seeded")

    hub = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("tinkex.client.rest.TRACE_POLL_SECONDS", 0.01)
    directory = tmp_path / "stage"
    write_folder(directory / "folder")
    for kind in KINDS:
        write_data(directory, kind)
    for name, value in Pipeline(directory).environ.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / ".tinkex" / "logs" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    yield Stage(seeded=seeded, tinkex=tinkex, directory=directory, monkeypatch=monkeypatch)
    hub.close()
