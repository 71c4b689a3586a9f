"""Write docs/schemas and docs/reference.md from the code; ``make golden`` runs it."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import typer.main
from torch import nn
from torch.utils.data import Dataset

import cli
import mmplan.zoo
from mmlaunch.session.session import Hooks, Session, StepResult
from mmplan import errors
from mmplan.planning.planner import BASELINES, SOLVERS
from mmplan.schema.base import (
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_YAML_BYTES,
    OBJECT,
    Document,
    docstring_parts,
)
from mmplan.schema.cluster import Cluster, load_cluster, shipped_clusters
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.wording import size

DOCS = Path(__file__).parent
SCHEMAS = DOCS / "schemas"
REFERENCE = DOCS / "reference.md"
MODELS: tuple[type[Document], ...] = (Workload, Cluster, Profile, Plan)
FILES = ("workload.yaml", "cluster.yaml", "profile.json", "plan.json")
PROGRAMS = {"mmplan": cli.mmplan_app, "mmlaunch": cli.mmlaunch_app}

HEAD = """# Reference

Made from the code by `docs/generate.py`: what is wrong here is wrong there.
Sizes are bytes (`_bytes`), times seconds (`_s`), rates per second. Ranks, blocks and samples count
from 0; ranges are half-open. Unknown fields of a file are refused by name."""
# What the command line itself adds to the errors' codes.
OTHER_CODES = {0: "Done.", 130: "Interrupted by Ctrl-C."}


def schema_text(model: type[Document]) -> str:
    """The schema of one file as it is kept in docs/schemas."""
    return json.dumps(model.model_json_schema(), indent=1, sort_keys=True) + "\n"


def reference_text() -> str:
    """The whole of docs/reference.md."""
    parts = [
        HEAD,
        contents(),
        *commands(),
        exit_codes(),
        limits(),
        *solvers(),
        *files(),
        clusters(),
        *zoo(),
        python(),
    ]
    return "\n\n".join(parts) + "\n"


def contents() -> str:
    """Links to the sections."""
    titles = [
        "Commands",
        "Exit codes",
        "Limits",
        "Solvers",
        *FILES,
        "Shipped clusters",
        "The zoo",
        "Python",
    ]
    return "\n".join(f"- [{title}](#{anchor(title)})" for title in titles)


# --- commands ---


def commands() -> Iterator[str]:
    """Every command with its arguments and options, as typer has them."""
    yield "## Commands"
    for program, app in PROGRAMS.items():
        group: Any = typer.main.get_command(app)
        for name, command in group.commands.items():
            yield f"### {program} {name}\n\n{command.help}"
            yield f"```console\n$ {usage(f'{program} {name}', command)}\n```"
            options = [option_row(p) for p in command.params if p.opts[0].startswith("-")]
            yield table(("option", "what it says", "default"), options)


def usage(path: str, command: Any) -> str:
    """One line: what must be given, and that there is more."""
    needed = [p.metavar for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-")]
    needed += [f"{p.opts[0]} {p.metavar}" for p in options if p.required]
    return " ".join([path, *needed, "[OPTIONS]"])


def option_row(option: Any) -> tuple[str, str, str]:
    """Its names and value, its help, and what it is when not given."""
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = "" if option.is_flag else f" `{option.metavar}`"
    given = None if option.is_flag else option.default
    default = "needed" if option.required else "" if given is None else f"`{given}`"
    return names + value, option.help, default


def exit_codes() -> str:
    """What each exit code means, from the errors that end a command with it."""
    classes = [e for e in vars(errors).values() if inspect.isclass(e)]
    said = {
        e.exit_code: first_paragraph(e)
        for e in classes
        if issubclass(e, errors.MMPlanError)
        and "exit_code" in vars(e)
        and e.__base__ is not Exception
    } | OTHER_CODES
    rows = [(f"`{code}`", said[code]) for code in sorted(said)]
    return "## Exit codes\n\n" + table(("code", "what it means"), rows)


def limits() -> str:
    """What is read of files that may come from elsewhere, and what becomes of odd text."""
    return f"""## Limits

What is larger is refused in one line with exit code 2, before it is parsed:

- A document is a regular file (no pipe, no device) of at most {size(MOST_BYTES)}.
- YAML has at most {size(MOST_YAML_BYTES)}, since its parser is slow; the same document may be
  written as JSON. Its aliases, written out, have at most {MOST_ENTRIES // OBJECT:,} entries.
- JSON has at most {MOST_ENTRIES:,} commas and brackets; an object counts for {OBJECT}.
- A workload has at most 1,000 modules, losses and tasks each.
- Of a run folder `mmplan report` reads the last 200,000 steps, and names files that it cannot read.

A plan's or workload's name names a folder: `/`, `\\`, `.` and `..` alone and characters that
cannot be printed are refused. Control characters of any other text reach the terminal as `\\x1b`,
and an error is one line. Files that are written keep the user's umask."""


# --- solvers ---


def solvers() -> Iterator[str]:
    """The solvers by file, in their own words, with their methods."""
    yield (
        "## Solvers\n\n`--solver auto` simulates the best plans of all that apply, and changes of "
        "these, and keeps the fastest. `--method` chooses how a solver searches; its first method "
        "is the default."
    )
    by_file: dict[str, list[str]] = {}
    known = SOLVERS | BASELINES
    for name, function in known.items():
        by_file.setdefault(function.__module__, []).append(name)
    for file, names in by_file.items():
        kind = "baseline" if names[0] in BASELINES else "solver"
        plural = "s" * (len(names) > 1)
        yield f"### {' and '.join(f'`{name}`' for name in names)} ({kind}{plural})"
        yield markdown(inspect.getdoc(sys.modules[file]) or "")
        found = [f"- `{name}` finds: {markdown(first_paragraph(known[name]))}" for name in names]
        yield "\n".join([*found, f"- methods: {methods(sys.modules[file])}"])


def methods(module: Any) -> str:
    """The names that ``--method`` takes, with what their table says of them."""
    known: Mapping[str, Any] = getattr(module, "METHODS", {"exact": ""})
    said = {name: getattr(value, "about", value) for name, value in known.items()}
    return ", ".join(f"`{name}`" + f" ({text})" * bool(text) for name, text in said.items())


# --- files ---


def files() -> Iterator[str]:
    """Every field of every file, from the JSON Schemas of their models."""
    shown: set[str] = set()
    for file, model in zip(FILES, MODELS, strict=True):
        schema = model.model_json_schema()
        name = model.__name__
        yield f"## {file}\n\n{link(name)} is the whole file; its JSON Schema: {schema_link(model)}."
        for record, fields in records(name, schema):
            if record in shown:
                continue
            shown.add(record)
            yield f"### {record}\n\n{markdown(fields['description'])}"
            needed = fields.get("required", [])
            rows = [field_row(*item, needed=needed) for item in fields["properties"].items()]
            yield table(("field", "type", "default", "what it says"), rows)


def schema_link(model: type[Document]) -> str:
    """Where the schema lies, from docs."""
    return f"[schemas/{model.kind}.json](schemas/{model.kind}.json)"


def records(name: str, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The file's own record and those it is made of, each behind the first that names it."""
    found, waiting = {name: schema}, [schema]
    while waiting:
        text = json.dumps(waiting.pop(0)["properties"])
        for part in re.findall(r"#/\$defs/(\w+)", text):
            if part not in found:
                found[part] = schema["$defs"][part]
                waiting.append(found[part])
    return list(found.items())


def field_row(name: str, field: dict[str, Any], *, needed: list[str]) -> tuple[str, str, str, str]:
    """One field's line of the table."""
    default = "needed" if name in needed else default_text(field)
    return f"`{name}`", type_text(field), default, markdown(field.get("description", ""))


def default_text(field: dict[str, Any]) -> str:
    """What holds when the field is absent; nothing where that is no value of its own."""
    default = field.get("default")
    named = "$ref" in field or default in (None, [], {})
    return "" if named else f"`{json.dumps(default)}`"


def type_text(field: dict[str, Any]) -> str:
    """A JSON Schema's type in words, with its limits."""
    if "$ref" in field:
        return link(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(map(type_text, parts_of(field)))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return array_text(field)
    if field.get("type") == "object":
        return mapping_text(field)
    words = {
        "string": "text",
        "boolean": "true or false",
        "integer": "whole number",
        "null": "null",
        None: "any",
    }
    limits = (("minimum", "from {} on"), ("exclusiveMinimum", "above {}"))
    kind = words.get(field.get("type")) or field["type"]
    return " ".join([kind, *(said.format(field[key]) for key, said in limits if key in field)])


def parts_of(field: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a field may have, without the null that stands for its absence."""
    return [p for p in field["anyOf"] if p.get("type") != "null" or "default" not in field]


def array_text(field: dict[str, Any]) -> str:
    """A pair, or a list of what it holds."""
    if "prefixItems" in field:
        return "[a, b]"
    return f"list of {type_text(field['items'])}"


def mapping_text(field: dict[str, Any]) -> str:
    """Names to what they are mapped to."""
    values = field.get("additionalProperties", True)
    return "mapping" if values is True else f"mapping to {type_text(values)}"


def clusters() -> str:
    """The clusters that come with the program."""
    rows = []
    for name in shipped_clusters():
        cluster = load_cluster(name)
        links = [cluster.links.intra_node, cluster.links.inter_node]
        speeds = [f"{item.bandwidth_bytes_per_s:g}" if item else "" for item in links]
        size, device = f"{cluster.nodes} x {cluster.devices_per_node}", cluster.device
        each = f"{device.memory_bytes:g}", f"{device.peak_flops:g}"
        rows.append((f"`{name}`", size, device.name, *each, *speeds))
    heads = ("name", "nodes x devices", "device", "bytes", "FLOP/s", "bytes/s in a node", "between")
    note = "`NAME-N` is N nodes like those of NAME (N processes for `cpu`): `--cluster a800-32`."
    return f"## Shipped clusters\n\n{note}\n\n{table(heads, rows)}"


# --- the zoo ---


def zoo() -> Iterator[str]:
    """The factories of mmplan.zoo, by what they make."""
    yield "## The zoo\n\nFactories for workload files. Arguments without a default are needed."
    titles = {nn.Sequential: "Modules", nn.Module: "Losses and metrics", Dataset: "Data"}
    made = [(name, function, returned(function)) for name, function in public_functions()]
    for base, title in titles.items():
        rows = [
            (f"`{name}`", markdown(first_paragraph(function)), parameters(function))
            for name, function, kind in made
            if next((b for b in titles if issubclass(kind, b)), None) is base
        ]
        yield f"### {title}\n\n{table(('factory', 'what it makes', 'args'), rows)}"


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of the zoo's files that are not private, as a workload names them."""
    for info in pkgutil.iter_modules(mmplan.zoo.__path__, "mmplan.zoo."):
        module = importlib.import_module(info.name)
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == info.name
            if own and not name.startswith("_"):
                yield f"{info.name}:{name}", function


def returned(function: Callable[..., Any]) -> type:
    """The class that a function says it returns."""
    found = get_type_hints(function).get("return")
    return found if inspect.isclass(found) else object


def parameters(function: Callable[..., Any]) -> str:
    """Its parameters with their defaults, without types."""
    found = inspect.signature(function).parameters.values()
    untyped = [p.replace(annotation=inspect.Parameter.empty) for p in found]
    return ", ".join(f"`{p}`" for p in untyped) or "none"


# --- Python ---


def python() -> str:
    """What user's own programs import."""
    session = [
        (f"`{name}({called(getattr(Session, name))})`", markdown(first_paragraph(method)))
        for name, method in vars(Session).items()
        if not name.startswith("_") and callable(getattr(Session, name))
    ]
    hooks = [(f"`hooks.{name}`", said) for name, said in attributes(Hooks).items()]
    result = [(f"`{name}`", said) for name, said in attributes(StepResult).items()]
    return "\n\n".join(
        [
            "## Python",
            "`mmplan.Ragged(values, lengths)` is a field whose length differs per sample; "
            "`mmplan.Workload` is workload.yaml as an object.",
            "### mmlaunch.Session\n\nHooks are lists of functions; each is called with the session "
            "and what happened.",
            table(("method", "what it does"), session),
            table(("hook", "when its functions are called"), hooks),
            table(("field of a step's result", "what it is"), result),
        ]
    )


def called(method: Callable[..., Any]) -> str:
    """A method's arguments as a call shows them."""
    found = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}=..." for p in found)


def attributes(kind: type) -> dict[str, str]:
    """What a class's docstring says under Attributes."""
    return {
        name: markdown(said)
        for name, said in docstring_parts(inspect.getdoc(kind) or "")[1].items()
    }


# --- Markdown ---


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |" for r in lines)


def markdown(docstring: str) -> str:
    """A docstring's roles and double backticks as Markdown has them."""
    plain = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", docstring)
    return plain.replace("``", "`")


def first_paragraph(thing: object) -> str:
    """Of its docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def link(record: str) -> str:
    """To a record's own table."""
    return f"[{record}](#{anchor(record)})"


def anchor(title: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    for model in MODELS:
        (SCHEMAS / f"{model.kind}.json").write_text(schema_text(model), encoding="utf-8")
    REFERENCE.write_text(reference_text(), encoding="utf-8")
