"""One type name means one thing in the whole source; constants stand one to a line."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.commands import ROOT

# What a type alias begins with, whatever its own name looks like.
GENERICS = {
    "Callable",
    "Literal",
    "Mapping",
    "NDArray",
    "Sequence",
    "Union",
    "dict",
    "list",
    "tuple",
}
# These make a parameter of types, which each module names for itself.
TYPE_PARAMETERS = {"TypeVar", "ParamSpec", "TypeVarTuple"}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = [ROOT / "cli.py", *ROOT.glob("mmplan/**/*.py"), *ROOT.glob("mmlaunch/**/*.py")]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in sorted(paths)]


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements outside functions and classes, those in ``if`` and ``try`` included."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield node
            yield from module_level(node)


def last_name(node: ast.expr | None) -> str:
    """``Callable`` of ``collections.abc.Callable[..., int]``; nothing of what has no name."""
    match node:
        case ast.Subscript() | ast.Call():
            return last_name(node.value if isinstance(node, ast.Subscript) else node.func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def is_type_alias(name: str, annotation: ast.expr | None, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and last_name(value) in TYPE_PARAMETERS:
        return False
    camel_case = re.fullmatch(r"_*[A-Z]+[a-z]\w*", name) and "_" not in name.strip("_")
    generic = isinstance(value, ast.Subscript) and last_name(value) in GENERICS
    return bool(camel_case) or generic or last_name(annotation) == "TypeAlias"


def type_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes wherever they stand, and of type aliases of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in module_level(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                yield from (name for name in names if is_type_alias(name, None, value))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if is_type_alias(name, annotation, value):
                    yield name
            case _:
                pass


def bundles(tree: ast.Module) -> Iterator[str]:
    """Statements of the module that bind several constants, each to a value of its own."""
    for node in module_level(tree):
        # Positions of one row, numbered by range, are one thing.
        if isinstance(node, ast.Assign) and last_name(node.value) != "range":
            found = [n for target in node.targets for n in ast.walk(target)]
            names = [
                n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            if sum(bool(re.fullmatch(r"[A-Z0-9_]*[A-Z][A-Z0-9_]*", name)) for name in names) > 1:
                yield ", ".join(names)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    class B: ...", ["A", "B"]),
        ("def make():\n    class Local: ...\n    Rows = list[int]", ["Local"]),
        ("Rows = NDArray[np.int64]", ["Rows"]),
        ("Loss = Callable[..., float]; _Pair = tuple[int, int]", ["Loss", "_Pair"]),
        ("Kind = Literal['a'] | None\nTree = Union[int, str]", ["Kind", "Tree"]),
        ("if TYPE_CHECKING:\n    TPPlan: TypeAlias = 'dict[str, str]'", ["TPPlan"]),
        ("ints = collections.abc.Sequence[int]", ["ints"]),
        ("LIMIT = 3\nT = TypeVar('T')\nItem = TypeVar('Item')\nFIRST = ROWS[0]\nlast = x[0]", []),
    ],
)
def test_what_counts_as_a_type_name(source: str, names: list[str]) -> None:
    assert list(type_names(ast.parse(source))) == names


def test_each_type_name_is_defined_once() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources():
        for name in type_names(tree):
            files[name].append(path)
    assert {"Plan", "Session", "Program"} <= set(files)
    twice = [f"{name}: {', '.join(where)}" for name, where in files.items() if len(where) > 1]
    assert not twice, "\n".join(twice)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("A, _B = 1, 2", ["A, _B"]),
        ("A = B = 1", ["A, B"]),
        ("A = 1\n_B_2: int = 2\na, b = 1, 2\nC = tuple(x for X, y in z)", []),
        ("FORWARD, BACKWARD = range(2)", []),
        ("def f():\n    A, B = 1, 2\nTABLE[KEY] = 3", []),
    ],
)
def test_what_counts_as_constants_in_one_statement(source: str, found: list[str]) -> None:
    assert list(bundles(ast.parse(source))) == found


def test_each_constant_stands_on_a_line_of_its_own() -> None:
    found = [f"{path}: {names}" for path, tree in sources() for names in bundles(tree)]
    assert not found, "\n".join(found)
