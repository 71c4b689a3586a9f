"""The one place that prints: tables and text for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from mmplan.errors import MMPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as data.

    Attributes:
        columns: headings; one that starts with ``>`` is right-aligned.
        note: a line below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Output:
    """Writes to a terminal, a pipe, or as JSON.

    Args:
        as_json: one JSON document goes to stdout, everything else to stderr.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def _people(self) -> IO[str]:
        return sys.stderr if self.as_json else sys.stdout

    def text(self, line: str = "") -> None:
        """A line for people."""
        print(line, file=self._people, flush=True)

    def hint(self, line: str) -> None:
        """A line on stderr."""
        print(f"hint: {line}", file=sys.stderr, flush=True)  # noqa: T201

    def data(self, document: Any) -> None:
        """The command's JSON document; nothing without ``--json``."""
        if self.as_json:
            print(json.dumps(document, indent=1, allow_nan=False), flush=True)  # noqa: T201

    def raw(self, text: str) -> None:
        """Text as it is, on stdout, for pipes."""
        sys.stdout.write(text)

    def grid(self, grid: Grid) -> None:
        """A table for people."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=grid.title, title_justify="left", box=box.SIMPLE_HEAD, expand=False)
        for column in grid.columns:
            right = column.startswith(">")
            table.add_column(column.lstrip(">"), justify="right" if right else "left")
        for row in grid.rows:
            table.add_row(*(Text(cell) for cell in row))
        # Piped output is not cut to a terminal's width.
        width = None if self._people.isatty() else 200
        console = Console(file=self._people, width=width, highlight=False)
        console.print(table)
        if grid.note:
            console.print(Text(grid.note))

    def error(self, error: MMPlanError, *, documented: bool = False) -> None:
        """An error line and its hint on stderr; with ``--json`` a document on stdout too.

        Args:
            documented: the command has already written its document.
        """
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        detail = getattr(error, "detail", "")
        if detail:
            print(detail.rstrip(), file=sys.stderr)  # noqa: T201
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)  # noqa: T201
        if documented:
            return
        self.data(
            {
                "error": {
                    "message": error.message,
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
            }
        )

    @contextmanager
    def progress(self, title: str) -> Generator[Progress]:
        """A progress bar on stderr with the time left; plain lines where there is no terminal."""
        progress = Progress(title)
        try:
            yield progress
        finally:
            progress.close()


class Progress:
    """A bar on a terminal; a line now and then elsewhere.

    Args:
        title: stands before the bar.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._live: Any = None
        self._task: Any = None
        self._last_percent = -1
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            self._live = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=sys.stderr),
            )
            self._task = self._live.add_task(title, total=None, note="")
            self._live.start()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Say how far it is."""
        if self._live is not None:
            self._live.update(self._task, completed=done, total=total, note=note)
            return
        percent = 100 * done // max(total, 1)
        if percent // 10 > self._last_percent // 10:
            self._last_percent = percent
            print(f"{self._title}: {done}/{total} {note}".rstrip(), file=sys.stderr)  # noqa: T201

    def close(self) -> None:
        """Take the bar down."""
        if self._live is not None:
            self._live.stop()
