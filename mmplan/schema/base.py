"""What every file of ours has in common: strict fields, versions, errors that name the place."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    Strict,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticSerializationError

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.wording import counted, size

# Scalars are strict ("3" is not 3); lists become tuples.
Str = Annotated[str, Strict()]
Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
# The largest whole number up to which all of them are floats as well.
MOST_COUNT = 2**53
Count = Annotated[int, Strict(), Field(ge=1, le=MOST_COUNT)]
Index = Annotated[int, Strict(), Field(ge=0, le=MOST_COUNT)]
Size = Annotated[float, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Range = tuple[Index, Index]
# The type of a training's computes.
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
ZeroStage = Literal[0, 1, 2, 3]
# A parsed document, or what processes tell each other.
Json = dict[str, Any]


def _is_a_file_name(name: str) -> str:
    if not name.strip() or name in (".", "..") or len(name.encode(errors="replace")) > 200:
        raise ValueError(f"{name!r:.60} cannot name a folder")
    wrong = next((c for c in name if c in "/\\" or not (c.isprintable() or c == " ")), None)
    if wrong is not None:
        raise ValueError(f"{name!r:.60} names a folder of its own: {wrong!r} cannot stand in it")
    return name


# What a run's folder is called after.
Name = Annotated[str, Strict(), AfterValidator(_is_a_file_name)]

# More than any file of ours has; what is read whole must end.
MOST_BYTES = 64 << 20
# The parser takes up to 35 microseconds a byte: with this much some four seconds.
MOST_YAML_BYTES = 128 << 10
# Of a JSON text: hundreds of megabytes at most, its faults included.
MOST_ENTRIES = 1_000_000
# An object counts for so many entries: each of its fields may be wrong or missing. So does an
# entry that a YAML file's aliases stand for.
OBJECT = 10
# Beyond this many faults the first ones are looked for in an excerpt.
_MANY_FAULTS = 10_000
_EXCERPT = 20


class Record(BaseModel):
    """A part of a file: immutable, unknown fields refused, no NaN and no infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse, where it is a field."""
        if name in type(self).model_fields:
            raise InvalidInputError(
                f"{name} of a {type(self).__name__} cannot be set: objects do not change",
                hint='make another one: mmplan.changed(workload, {"train.seed": 1})',
            )
        super().__setattr__(name, value)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The JSON Schema, with what the docstring says of each field at that field."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        text, fields = docstring_parts(schema.get("description", ""))
        if fields:
            schema["description"] = text
            for name, said in fields.items():
                schema["properties"][name]["description"] = said
        return made


class Document(Record):
    """A whole file; ``version`` is the newest that this program reads and the one it writes."""

    kind: ClassVar[str]
    readable_version: ClassVar[int] = 1

    version: Int = Field(default=1, description="of the file's format")

    _read_from: Path | None = PrivateAttr(default=None)

    @property
    def read_from(self) -> Path | None:
        """The file that it, or what it is a changed copy of, was read from."""
        return self._read_from

    def as_read_from(self, path: Path | None) -> Self:
        """This object, which remembers its file from now on."""
        self._read_from = path and path.absolute()
        return self

    def __eq__(self, other: object) -> bool:
        """By its fields: the file is not one of them."""
        return type(self) is type(other) and vars(self) == vars(other)


def docstring_parts(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring before its ``Attributes:``, and what that section says of each name."""
    text, _, section = docstring.partition("\n\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return text, {name: " ".join(said.split()).removesuffix(".") for name, said in entries}


DocumentT = TypeVar("DocumentT", bound=Document)


def load_document(model: type[DocumentT], path: str | Path) -> DocumentT:
    """Read and validate one file, JSON or (where people write it) YAML 1.2.

    Raises:
        InvalidInputError: the file cannot be read, parsed or validated; the message
            names the file and the field.
    """
    path = Path(path)
    found = parse_document(model, parse_text(read_text(path), path), source=str(path))
    return found.as_read_from(path)


def parse_document(model: type[DocumentT], data: object, *, source: str) -> DocumentT:
    """Validate already parsed data; ``source`` is what errors call it."""
    if not isinstance(data, dict):
        found = "nothing: it is empty" if data is None else type(data).__name__
        raise InvalidInputError(
            f"{source}: a {model.kind} is a mapping of fields, got {found}",
            hint=f"see docs/schemas/{model.kind}.json for its fields",
        )
    version = data.get("version")
    if isinstance(version, int) and not 1 <= version <= model.readable_version:
        raise InvalidInputError(
            f"{source}: {model.kind} has version {version}, this mmplan reads up to "
            f"{model.readable_version}",
            hint="upgrade mmplan, or write the file again with this version",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if error.error_count() > _MANY_FAULTS:
            return parse_document(model, _excerpt(data), source=source)
        raise _explain(error, model, cast(Json, data), source) from None


def validated(document: DocumentT) -> DocumentT:
    """A document that was changed in Python, held against the rules of its file.

    Raises:
        InvalidInputError: ``model_copy`` or a change of a mapping broke one; names the field.
    """
    source = f"the {document.kind} in Python"
    model = type(document)
    try:
        data = document.model_dump(mode="json", exclude_unset=True, warnings=False)
    except PydanticSerializationError as error:
        raise InvalidInputError(
            f"{source}: a value cannot stand in a file: {error}", hint="use what JSON has"
        ) from None
    # Names that model_copy took for fields.
    unknown = document.model_fields_set - set(model.model_fields)
    data |= {name: str(vars(document).get(name)) for name in unknown}
    return parse_document(model, data, source=source).as_read_from(document.read_from)


def unchanged_file(document: Document) -> Path | None:
    """The file that a document was read from; None where it says something else by now."""
    path, here = document.read_from, Path.cwd()
    try:
        if path is None or load_document(type(document), path) != document:
            return None
    except InvalidInputError:
        return None
    return path.relative_to(here) if path.is_relative_to(here) else path


def _excerpt(data: Any) -> Any:
    """The first entries of everything: what is wrong a hundred thousand times is wrong there."""
    if isinstance(data, dict):
        return {key: _excerpt(data[key]) for key in list(data)[:_EXCERPT]}
    return [_excerpt(item) for item in data[:_EXCERPT]] if isinstance(data, list) else data


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        InvalidInputError: see :func:`read_bytes`, or it is not UTF-8 text.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise InvalidInputError(
            f"{path}: cannot be read: it is not UTF-8 text", hint="check the path"
        ) from None


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        InvalidInputError: there is no such file, it is a pipe or a device, which may never end,
            or larger than any of ours.
    """
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            what = "a folder" if S_ISDIR(found.st_mode) else "no file"
            raise InvalidInputError(f"{path}: is {what}", hint="name a file")
        if found.st_size > MOST_BYTES:
            raise InvalidInputError(
                f"{path}: {size(found.st_size)} is more than such a file can have",
                hint=f"at most {size(MOST_BYTES)} are read",
            )
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = str(error)  # a path with a null byte
    raise InvalidInputError(f"{path}: cannot be read: {reason}", hint="check the path")


def parse_text(text: str, path: Path) -> object:
    """Parse JSON (a text that starts with a brace, or a .json file), else YAML 1.2."""
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return parse_json(text, path)
    return parse_yaml(text, path)


def parse_json(text: str, path: Path, *, most_entries: int = MOST_ENTRIES) -> object:
    """Parse JSON.

    Args:
        text: of a document.
        path: for errors.
        most_entries: a text with more is none of ours; commas and brackets are counted, before
            anything is made of them.

    Raises:
        InvalidInputError: it is no JSON, or larger than any file of ours.
    """
    entries = text.count(",") + text.count("[") + OBJECT * text.count("{")
    if entries > most_entries:
        raise InvalidInputError(
            f"{path}: {entries:,} fields and entries are more than such a file can have",
            hint=f"at most {most_entries:,} are read, an object counts for {OBJECT}",
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise InvalidInputError(
                    f"{path}: the key {key!r} stands twice in one object",
                    hint="keep one of them",
                )
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="the file may be cut off; write it again",
        ) from None
    except RecursionError:
        raise InvalidInputError(
            f"{path}: nested too deeply to be one of our files", hint="write the file again"
        ) from None
    except ValueError:
        raise InvalidInputError(
            f"{path}: not valid JSON: a number has more digits than can be read",
            hint="write the file again",
        ) from None


def parse_yaml(text: str, path: Path) -> object:
    """Parse YAML 1.2.

    Args:
        text: of a document.
        path: for errors.

    Raises:
        InvalidInputError: it is no YAML, or larger than any file of ours.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > MOST_YAML_BYTES:
        raise InvalidInputError(
            f"{path}: {size(len(text))} of YAML",
            hint=f"at most {size(MOST_YAML_BYTES)} are read; write it as JSON",
        )
    try:
        data: object = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise InvalidInputError(
            f"{path}: not valid YAML{where}: {problem}", hint="mend that line"
        ) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: not valid YAML: {' '.join(str(error).split()):.200}", hint="mend the file"
        ) from None
    if _entries(data, {}) > MOST_ENTRIES // OBJECT:
        raise InvalidInputError(
            f"{path}: its aliases stand for more than {MOST_ENTRIES // OBJECT:,} entries",
            hint="write out what is meant",
        )
    return data


def _entries(data: object, known: dict[int, int]) -> int:
    """Entries of what was parsed, each alias written out."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in known:
        known[id(data)] = 1  # of one that holds itself
        inner = data.values() if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_entries(item, known) for item in inner)
    return known[id(data)]


_MENDS = {
    "missing": "add the field",
    "extra_forbidden": "remove it, or correct its spelling",
    "finite_number": "NaN and infinity are not values; measure or write it again",
}


# Fields that only one of our files has.
_MARKS: dict[str, set[str]] = {
    "plan": {"units"},
    "profile": {"cluster", "modules"},
    "cluster": {"devices_per_node"},
    "workload": {"modules", "batch"},
}


def _explain(
    error: ValidationError, model: type[Document], data: Json, source: str
) -> InvalidInputError:
    """One line for the first fault; the others are only counted."""
    faults = _of_meant_branches(error.errors(include_url=False))
    found = next((kind for kind, marks in _MARKS.items() if data.keys() >= marks), None)
    if any(fault["type"] == "missing" for fault in faults) and found not in (None, model.kind):
        return InvalidInputError(
            f"{source}: this is a {found}, not a {model.kind}",
            hint=f"name the {model.kind}'s file instead",
        )
    # A name spelt wrong is an unknown field and a missing one: the former says where to look.
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    others = len({_place(fault) for fault in faults}) - 1
    more = f" (and {counted(others, 'more fault')})" if others else ""
    # A fault of the whole file names its field itself.
    where = ": ".join(filter(None, [source, _place(first)]))
    return InvalidInputError(
        f"{where}: {_choices(first, faults) or _problem(first)}{more}",
        hint=_mend(first, faults, model),
    )


def _of_meant_branches(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without what a mapping is told for not being one of some words."""
    meant = [
        fault
        for fault in faults
        if not (fault["type"] == "literal_error" and isinstance(fault["input"], dict))
    ]
    return meant or faults


def _choices(first: ErrorDetails, faults: list[ErrorDetails]) -> str | None:
    """What a field takes that is one of some words, or else a switch or a mapping."""
    here = [fault for fault in faults if _place(fault) == _place(first)]
    kinds = {fault["type"] for fault in here}
    words = [
        str(fault.get("ctx", {})["expected"]) for fault in here if fault["type"] == "literal_error"
    ]
    switch = ["true, false"] if "bool_type" in kinds else []
    mapping = ["a mapping of fields"] if "model_type" in kinds else []
    if not words or not (switch or mapping):
        return None
    return f"must be {' or '.join((*switch, *words, *mapping))}, got {first['input']!r:.60}"


def _mend(first: ErrorDetails, faults: list[ErrorDetails], model: type[Document]) -> str:
    *parent, name = first["loc"] or ("",)
    missing = [
        str(fault["loc"][-1])
        for fault in faults
        if fault["type"] == "missing" and list(fault["loc"][:-1]) == parent
    ]
    if first["type"] == "extra_forbidden":
        known = [name for record in _records_at(model, parent) for name in record.model_fields]
        for names in (missing, known):
            similar = get_close_matches(str(name), names, n=1)
            similar += [other for other in names if str(name).startswith(other)]
            if similar:
                return f"correct its spelling: {similar[0]}"
    return _MENDS.get(first["type"], f"see docs/schemas/{model.kind}.json")


def _records_at(model: type[Record], location: list[int | str]) -> set[type[Record]]:
    """The kinds of record that may stand at a place of a document."""
    kinds = {model}
    for part in location:
        fields = (kind.model_fields[part] for kind in kinds if part in kind.model_fields)
        # Keys of mappings, places in lists and branches of unions lead no deeper.
        kinds = {kind for field in fields for kind in _records_in(field.annotation)} or kinds
    return kinds


def _records_in(annotation: Any) -> Iterator[type[Record]]:
    """The kinds of record in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for inner in get_args(annotation):
        yield from _records_in(inner)


def _place(fault: ErrorDetails) -> str:
    # Union branches show up in the location as type names with brackets or lower-case tags.
    parts = map(str, fault["loc"])
    return ".".join(part for part in parts if "[" not in part and part not in _BRANCH_TAGS)


_BRANCH_TAGS = {"bool", "int", "constrained-int", "str", "float", "list", "tuple", "CallbackSpec"}


_WORDINGS = {
    "model_type": "must be a mapping of fields",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must look like {pattern}",
}


def _problem(fault: ErrorDetails) -> str:
    match fault["type"]:
        case "missing":
            return "the field is missing"
        case "extra_forbidden":
            return "unknown field"
        case "value_error":
            return fault["msg"].removeprefix("Value error, ")
        case kind:
            known = _WORDINGS.get(kind)
            context = fault.get("ctx", {})
            said = (
                known.format(**context) if known else f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
            )
            return f"{said}, got {fault['input']!r:.60}"


def document_text(document: Document) -> str:
    """The file's text: indented JSON, stable order, ending in a newline."""
    data = document.model_dump(mode="json", exclude_none=True)
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def save_document(document: Document, path: str | Path) -> None:
    """Write the file whole or not at all."""
    write_text(Path(path), document_text(document))


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name and rename: a killed command leaves the old file whole.

    Raises:
        UnfitEnvironmentError: the folder is missing or read-only, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # A text from elsewhere may hold halves of characters, which no file can.
            with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UnfitEnvironmentError(
            f"{path}: cannot be written: {error.strerror}",
            hint="free some space or choose another folder",
        ) from None


def relative_path(path: str | Path, folder: Path) -> str:
    """A file's path as another file in a folder has it."""
    return Path(os.path.relpath(Path(path).resolve(), folder.resolve())).as_posix()


def text_sha256(text: str) -> str:
    """SHA-256 of a text's file, in hex."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
