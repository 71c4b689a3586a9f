"""Fields of a workload that are set: ``--set KEY=VALUE``, or in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args

from mmplan.errors import InvalidInputError
from mmplan.schema.agreement import plan_differences
from mmplan.schema.base import Record, parse_document, parse_yaml
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Dotted field to value, of ``KEY=VALUE`` texts; values are YAML, the last of a key counts.

    Raises:
        InvalidInputError: a text without a key or a value, or a value that is no YAML.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        if not key or not value:
            raise InvalidInputError(
                f"--set {text}: is not KEY=VALUE", hint="--set train.optimizer_args.lr=1e-3"
            )
        found[key] = parse_yaml(value, Path(f"--set {key}"))
    return found


def with_settings(
    workload: Workload, settings: Mapping[str, Any], *, source: str = "--set"
) -> Workload:
    """The workload with other values of some fields.

    Args:
        workload: to change.
        settings: dotted field to value: ``train.optimizer_args.lr``, ``train.groups.0.match``.
        source: what errors call them.

    Raises:
        InvalidInputError: there is no such field, or it does not take that value.
    """
    if not settings:
        return workload
    document = workload.model_dump(mode="json", exclude_unset=True)
    for key, value in settings.items():
        _put(document, workload, key, value, source)
    return parse_document(Workload, document, source=source).as_read_from(workload.read_from)


def check_settings(plan: Plan, workload: Workload, settings: Mapping[str, Any]) -> None:
    """Refuse settings of fields that a plan depends on.

    Args:
        plan: that agrees with the workload as it is in its file.
        workload: with the settings.
        settings: for the message.

    Raises:
        InvalidInputError: names the first field that differs.
    """
    found = plan_differences(plan, workload)
    if found:
        raise InvalidInputError(
            f"--set {', '.join(settings)}: the plan depends on it: {found[0]}",
            hint="change the workload and solve again: mmplan solve WORKLOAD --profile PROFILE "
            "-o PLAN",
        )


def _put(document: Any, owner: Any, key: str, value: Any, source: str) -> None:
    """Set one field of a document.

    Args:
        document: without the fields that have their defaults.
        owner: what the document says, defaults included.
        key: dotted.
        value: of the field.
        source: what errors call it.
    """
    *parents, last = key.split(".")
    known, closed = _fields(owner, None)
    for depth, part in enumerate(parents):
        if part not in known:
            _refuse(f"{source} {key}", parents[:depth], part, known)
        owner, kind = known[part]
        if isinstance(document, list):
            document = document[int(part)]
        else:
            document = document.setdefault(part, {})
        known, closed = _fields(owner, kind)
    if closed and last not in known:
        _refuse(f"{source} {key}", parents, last, known)
    document[int(last) if isinstance(document, list) else last] = value


def _fields(owner: Any, kind: Any) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """The entries of a value, each with its declared type, and whether others are refused."""
    if isinstance(owner, Record):
        fields = type(owner).model_fields
        return {name: (getattr(owner, name), f.annotation) for name, f in fields.items()}, True
    if isinstance(owner, tuple | list):
        return {str(index): (item, None) for index, item in enumerate(owner)}, True
    if isinstance(owner, dict):
        inner = (get_args(kind) or (None,))[-1]
        # Names of modules, losses and tasks stand for what is there; arguments may be new.
        closed = isinstance(inner, type) and issubclass(inner, Record)
        return {str(name): (item, None) for name, item in owner.items()}, closed
    return {}, True


def _refuse(what: str, parents: Sequence[str], part: str, known: Mapping[str, Any]) -> NoReturn:
    where = ".".join(parents) or "the workload"
    similar = get_close_matches(part, known, n=1)
    meant = f"did you mean {similar[0]}? " if similar else ""
    raise InvalidInputError(
        f"{what}: {where} has no field {part!r}",
        hint=f"{meant}{where} has {', '.join(known) or 'no fields'}",
    )
