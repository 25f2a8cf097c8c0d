"""Generate parts of the docs from the code: settings, endpoints, commands, lists.

python docs/generate.py           # rewrite the text between the markers
python docs/generate.py --check   # change nothing; fail if a page is stale
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import tour
from prometheus_client.metrics import MetricWrapperBase

import tinkex
import tinkex.testing
import tinkex.types
from tinkex import errors, settings
from tinkex.cli.commands.serve import serve
from tinkex.cli.main import main as tinkex_command
from tinkex.cli.options import GlobalOption
from tinkex.client.config import Config
from tinkex.pipeline.settings_options import STAGES
from tinkex.pipeline.settings_sources import default_value as stage_default
from tinkex.pipeline.train_settings import OPTIONS
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import variable_name
from tinkex.server.http import prometheus
from tinkex.server.inference.inference_router import BASE_PATHS, ROOTS
from tinkex.server.inference.inference_routes import INFERENCE_ROUTES
from tinkex.wire import endpoints

DOCS = Path(__file__).parent
BEGIN, END = "<!-- generated: {name} -->", "<!-- end generated -->"
#: The most important modules first; the rest follows by name.
FIRST_TYPES = ("inputs", "tensors", "training", "optimizers", "sampling", "models", "checkpoints")
#: Groups of trainer options, by the first option of each.
TRAINER_GROUPS = {"out_dir": "Paths", "hidden_size": "Model", "epochs": "Training"}
TRAINER_GROUPS |= {"save_interval": "Checkpoints", "eval_interval": "Evaluation and device"}
FIRST = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")


# --- read the code ---------------------------------------------------------------------------


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class, which Python discards."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(after.value, ast.Constant)
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def homes(module: ModuleType) -> dict[str, str]:
    """Return the module of each public name of a lazy package, from its type-checking imports."""
    tree = ast.parse(inspect.getsource(module))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    found = {alias.name: node.module for node in imports if node.module for alias in node.names}
    public = {*module.__all__, *getattr(module, "_OWN", ())}
    return {name: home for name, home in found.items() if name in public}


def default_of(cls: type, name: str) -> str:
    """Format the default of a field."""
    field = next(each for each in fields(cls) if each.name == name)
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return "`{}`" if made == {} else "read by `Config.new`"
    return f"`{field.default!r}`".replace("'", '"')


# --- tables ----------------------------------------------------------------------------------


def settings_table() -> str:
    """Table of the fields of Config."""
    rows = [
        (f"`{name}`", default_of(Config, name), text) for name, text in field_docs(Config).items()
    ]
    return table(("setting", "default", "meaning"), rows)


def environment_table() -> str:
    """Table of the environment variables of the client."""
    rows = []
    for name, text in field_docs(settings.Environment).items():
        variables, _, meaning = text.partition(": ")
        if variables.partition(",")[0].isupper():
            rows.append((marked(variables), sentence(meaning), f"`{name}`"))
    return table(("variable", "meaning", "field"), rows)


def marked(variables: str) -> str:
    """Mark variable names as code."""
    return " ".join(
        f"`{word.rstrip(',')}`{',' * word.endswith(',')}" if word.rstrip(",").isupper() else word
        for word in variables.split()
    )


def sentence(text: str) -> str:
    """Capitalize the first letter."""
    return text[:1].upper() + text[1:]


def server_table() -> str:
    """Table of the server settings: TOML key, variable, flag, default and meaning."""
    rows = []
    for name, text in field_docs(ServerConfig).items():
        key = "" if name == "home" else f"`{name}`"
        rows.append((key, f"`{variable_name(name)}`", flag_of(name), server_default(name), text))
    return table(("TOML key", "variable", "flag", "default", "meaning"), rows)


def flag_of(name: str) -> str:
    """Return the flag of `tinkex serve` that sets a field, or an empty string."""
    flags = {option.name: option.opts[0] for option in serve.params}
    return f"`{flags[name]}`" if name in flags else ""


def server_default(name: str) -> str:
    """Format a server default as TOML; sizes also in MiB."""
    if name == "home":
        return "`~/.tinkex`"
    value = default_value(ServerConfig, name)
    size = f" ({value >> 20} MiB)" if "_bytes" in name and value else ""
    return f"`{toml_value(value)}`{size}"


def server_toml() -> str:
    """A settings file that contains every default."""
    lines = []
    for name, text in field_docs(ServerConfig).items():
        if name != "home":
            lines += [f"# {text}", f"{name} = {toml_value(default_value(ServerConfig, name))}"]
    return "```toml\n" + "\n".join(lines) + "\n```"


def default_value(cls: type, name: str) -> Any:
    """Return the default of a field."""
    field = next(each for each in fields(cls) if each.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def toml_value(value: Any) -> str:
    """Format a value as TOML; for the types used here this equals JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def trainer_tables() -> str:
    """Tables of the trainer options by group; options of a single stage come last."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    heading = ""
    for name, option in OPTIONS.items():
        heading = TRAINER_GROUPS.get(name, heading)
        row = (f"`--{name}`", trainer_default(name), option.help)
        group = heading if option.stages == STAGES else f"{option.stages[0].upper()} only"
        rows.setdefault(group, []).append(tuple(cell.replace("<", "&lt;") for cell in row))
    order = sorted(rows, key=lambda group: group.endswith("only"))
    headings = ("option", "default", "meaning")
    return "\n\n".join(f"### {group}\n\n{table(headings, rows[group])}" for group in order)


def trainer_default(name: str) -> str:
    """Format the default of an option, by stage where defaults differ."""
    defaults = {stage: stage_default(stage, name) for stage in STAGES}
    first = defaults[STAGES[0]]
    if first is MISSING:
        return "required"
    if len(set(defaults.values())) > 1:
        return ", ".join(f"{stage} {value}" for stage, value in defaults.items())
    if isinstance(first, tuple):
        return ", ".join(first)
    return "" if first is None or first is False else str(first)


def metrics_table() -> str:
    """Table of the server's Prometheus metrics."""
    rows = []
    for metric in vars(prometheus).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        family = metric.describe()[0]
        name = family.name + "_total" * (family.type == "counter")
        # The label names are not public before the first sample.
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return table(("metric", "kind", "labels", "meaning"), rows)


def endpoint_table() -> str:
    """Table of the endpoints."""
    rows = []
    for name, row in endpoints.ENDPOINTS.items():
        reply = (
            "a future of " + type_name(row.result_type) if row.result_type else type_name(row.reply)
        )
        notes = ["older servers only"] * row.is_legacy + ["protobuf"] * (row.body == "proto")
        notes += ["tinkex servers only"] * row.is_tinkex_only
        request = type_name(row.request)
        path = f"`{row.method} {endpoints.PREFIX}{row.path}`"
        rows.append((f"`{name}`", path, request, reply, ", ".join(notes)))
    return table(("name", "request", "message", "response", ""), rows)


def inference_table() -> str:
    """Table of the endpoints for clients of the OpenAI and Anthropic APIs."""
    rows = []
    for route in INFERENCE_ROUTES:
        bases = ROOTS if route.is_rooted else BASE_PATHS[route.family]
        paths = ", ".join(f"`{route.method} {base}{route.path}`" for base in bases)
        summary = sentence(inspect.getdoc(route.handler) or "")
        rows.append((route.family.value, paths, summary))
    return table(("family", "request", "what it does"), rows)


def type_name(type_: Any) -> str:
    """Return the name of a message; empty for a message without content."""
    return "" if type_.__name__ == "Empty" else f"`{type_.__name__}`"


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


# --- lists for the API reference -------------------------------------------------------------


def client_list() -> str:
    """Directives for all names of tinkex that are neither types nor errors."""
    found = {
        name: home for name, home in homes(tinkex).items() if home.startswith("tinkex.client.")
    }
    rest = sorted(found.keys() - set(FIRST), key=str.lower)
    first = directives((f"{found[name]}.{name}" for name in FIRST), inherited_members="true")
    listed = [f"{found[name]}.{name}" for name in rest]
    logs = [f"tinkex.logs.{name}" for name in ("attach_logger", "detach_logger")]
    others = directives([*listed, "tinkex.auth", *logs, "tinkex.as_tinker.install_as_tinker"])
    return f"{first}\n\n{others}"


def error_list() -> str:
    """Directives for the errors, in the order of the hierarchy."""
    public = homes(tinkex)
    order = [name for name, value in vars(errors).items() if getattr(value, "__name__", "") == name]
    names = [name for name in order if public.get(name) == "tinkex.errors"]
    return directives(f"tinkex.errors.{name}" for name in [*names, "RequestErrorCategory"])


def type_list() -> str:
    """Directives for the types, by module."""
    by_home: dict[str, list[str]] = {f"tinkex.types.{name}": [] for name in FIRST_TYPES}
    for name, home in homes(tinkex.types).items():
        if home.startswith("tinkex.types."):
            by_home.setdefault(home, []).append(name)
    return "\n\n".join(
        f"## {first_sentence(home)}\n\n"
        + directives((f"{home}.{name}" for name in names), heading_level="3")
        for home, names in by_home.items()
    )


def first_sentence(module: str) -> str:
    """Return the first line of a module's docstring, as a heading."""
    text = (sys.modules.get(module) or __import__(module, fromlist=["_"])).__doc__ or ""
    return text.partition("\n")[0].rstrip(".")


def testing_list() -> str:
    """Directives for the names of tinkex.testing."""
    return directives(f"{home}.{name}" for name, home in homes(tinkex.testing).items())


def directives(names: Iterable[str], **options: str) -> str:
    """Lines that mkdocstrings replaces by documentation."""
    lines = "".join(f"\n      {name}: {value}" for name, value in options.items())
    suffix = f"\n    options:{lines}" if options else ""
    return "\n\n".join(f"::: {name}{suffix}" for name in names)


# --- the command line ------------------------------------------------------------------------


def walk(command: click.Command, ctx: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and all its subcommands."""
    yield ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None, f"{ctx.command_path} lists {name} and has none"
            yield from walk(found, click.Context(found, parent=ctx, info_name=name))


def contexts() -> list[click.Context]:
    """Return the contexts of all commands."""
    return list(
        walk(
            tinkex_command,
            click.Context(tinkex_command, info_name="tinkex", **tinkex_command.context_settings),
        )
    )


def global_table() -> str:
    """Table of the global options."""
    return option_table(contexts()[0], are_global=True)


def command_list() -> str:
    """Usage, help, options and an example of every command."""
    examples = tomllib.loads((DOCS / "cli" / "examples.toml").read_text(encoding="utf-8"))
    return "\n\n".join(part for ctx in contexts() if ctx.parent for part in describe(ctx, examples))


def describe(ctx: click.Context, examples: dict[str, str]) -> Iterator[str]:
    """Yield the parts of the reference of one command."""
    words = ctx.command_path.removeprefix("tinkex ")
    is_top = ctx.parent is not None and ctx.parent.parent is None
    yield f"{'##' if is_top else '###'} tinkex {words}"
    usage = " ".join(ctx.command.collect_usage_pieces(ctx))
    yield f"```text\n{ctx.command_path} {usage}\n```"
    yield prose(ctx.command.help or "")
    rows = option_table(ctx)
    if rows:
        yield rows
    if words in examples:
        lines = (f"$ {line}" for line in examples[words].strip().splitlines())
        yield "```console\n" + "\n".join(lines) + "\n```"


def prose(text: str) -> str:
    """Convert help text to Markdown; preformatted paragraphs become code blocks."""
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        bare = paragraph.strip("\n").lstrip()
        if bare.startswith("\b"):
            parts.append(f"```text\n{inspect.cleandoc(bare.removeprefix(chr(8)))}\n```")
        else:
            parts.append(" ".join(bare.split()))
    return "\n\n".join(parts)


def option_table(ctx: click.Context, *, are_global: bool = False) -> str:
    """Table of the arguments and options of a command, its own or the global ones."""
    rows = []
    for param in ctx.command.get_params(ctx):
        if isinstance(param, GlobalOption) is not are_global or "--help" in param.opts:
            continue
        record = param.get_help_record(ctx)
        name, meaning = record or (param.make_metavar(ctx), "")
        # click appends defaults and ranges in brackets.
        sentence, bracket, limits = meaning.partition("  [")
        limits = f"`{limits.removesuffix(']').replace(']  [', '; ')}`" if bracket else ""
        rows.append((f"`{name}`", sentence or "see above", limits))
    return table(("argument or option", "meaning", "default, range"), rows) if rows else ""


@cache
def recorded_scenes() -> dict[str, str]:
    """Run the commands of the tour, once, and return their output."""
    return tour.record()


def scene(name: str) -> Callable[[], str]:
    """Return a function that renders one part of the tour."""
    return lambda: recorded_scenes()[name]


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "cli/tour.md": {name: scene(name) for name in tour.SCENES},
    "cli/reference.md": {"global": global_table, "commands": command_list},
    "configuration.md": {"settings": settings_table, "environment": environment_table},
    "endpoints.md": {"endpoints": endpoint_table},
    "server/inference.md": {"inference": inference_table},
    "pipeline.md": {"trainers": trainer_tables},
    "server/configuration.md": {"server": server_table, "example": server_toml},
    "server/operations.md": {"metrics": metrics_table},
    "reference/clients.md": {"clients": client_list},
    "reference/errors.md": {"errors": error_list},
    "reference/types.md": {"types": type_list},
    "reference/testing.md": {"testing": testing_list},
}


# --- pages -----------------------------------------------------------------------------------


def filled(page: str, name: str, text: str) -> str:
    """Replace the text between the markers of one part."""
    begin = BEGIN.format(name=name)
    before, found, after = page.partition(begin)
    _old, closed, rest = after.partition(END)
    if not found or not closed:
        raise ValueError(f"the page has no {begin} ... {END}")
    return f"{before}{begin}\n\n{text}\n\n{END}{rest}"


def render(path: str) -> str:
    """Return a page with all generated parts up to date."""
    page = (DOCS / path).read_text(encoding="utf-8")
    for name, make in PARTS[path].items():
        page = filled(page, name, make())
    return page


def main() -> int:
    """Rewrite stale pages; with --check, only list them."""
    stale = [path for path in PARTS if render(path) != (DOCS / path).read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"docs/{path} is stale; run python docs/generate.py\n")
        return 1 if stale else 0
    for path in stale:
        (DOCS / path).write_text(render(path), encoding="utf-8")
        sys.stdout.write(f"wrote docs/{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
