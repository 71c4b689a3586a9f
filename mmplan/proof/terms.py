"""What a value is, as a term: a field, a block applied to values, an element of a tuple.

Equal terms have equal numbers, so that two ways to write a model are compared by numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Number of a term.
Term = int


@dataclass(frozen=True, slots=True)
class DataField:
    """A field of a task's samples."""

    task: str
    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """The value of a ``null`` input."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a tuple."""

    value: Term
    index: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A block applied to values.

    Attributes:
        owner: module whose parameters it uses.
        trained: whether these parameters get a gradient from this use.
    """

    owner: str
    block: int
    trained: bool
    arguments: tuple[Term, ...]


Form = DataField | Nothing | Element | Applied


@dataclass(slots=True)
class Terms:
    """All terms that were made, each once."""

    forms: list[Form] = field(default_factory=list[Form])
    _numbers: dict[Form, Term] = field(default_factory=dict[Form, Term])

    def of(self, form: Form) -> Term:
        """The number of a term."""
        found = self._numbers.get(form)
        if found is None:
            found = self._numbers[form] = len(self.forms)
            self.forms.append(form)
        return found

    def field(self, task: str, name: str | None) -> Term:
        """A data field, or nothing."""
        return self.of(Nothing() if name is None else DataField(task, name))

    def element(self, value: Term, index: int | None) -> Term:
        """An element of a value, None for all of it."""
        return value if index is None else self.of(Element(value, index))

    def blocks(
        self,
        owner: str,
        blocks: tuple[int, int],
        trained: Sequence[tuple[int, int]],
        arguments: tuple[Term, ...],
    ) -> Term:
        """Consecutive blocks: the first takes the arguments, each other one the value before it.

        Args:
            owner: module whose parameters they use.
            blocks: half-open range, not empty.
            trained: the ranges of blocks that train.
            arguments: of the first block.
        """
        for block in range(*blocks):
            trains = any(low <= block < high for low, high in trained)
            arguments = (self.of(Applied(owner, block, trains, arguments)),)
        return arguments[0]

    def text(self, term: Term) -> str:
        """The term for people: ``text[0,12)(tokens)``."""
        match self.forms[term]:
            case DataField(name=name):
                return name
            case Nothing():
                return "null"
            case Element(value=value, index=index):
                return f"{self.text(value)}.{index}"
            case Applied(owner=owner, block=last, trained=trained, arguments=arguments):
                first = last
                while len(arguments) == 1:
                    inner = self.forms[arguments[0]]
                    before = owner, first - 1, trained
                    if (
                        not isinstance(inner, Applied)
                        or (inner.owner, inner.block, inner.trained) != before
                    ):
                        break
                    first, arguments = first - 1, inner.arguments
                given = ", ".join(map(self.text, arguments))
                return f"{'' if trained else 'frozen '}{owner}[{first},{last + 1})({given})"
