"""The one place that prints: tables and text for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size
from textwrap import fill
from threading import Lock, Timer
from typing import IO, Any

from mmplan.errors import MMPlanError, UnfitEnvironmentError

# Longest silence of a progress without a terminal.
_LINE_S = 30.0
# Width of piped tables, unless COLUMNS says another; chosen by hand.
_PIPE_COLUMNS = 200
# A column of longer texts may be folded to so many characters; chosen by hand.
_TEXT_COLUMNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as data.

    Attributes:
        columns: headings; one that starts with ``>`` is right-aligned.
        note: a line below the table.
        keys: the first columns, which say what a row is.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    keys: int = 1


class Output:
    """Writes to a terminal, a pipe, or as JSON.

    Args:
        as_json: one JSON document goes to stdout, everything else to stderr.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def _people(self) -> IO[str] | None:
        return sys.stderr if self.as_json else sys.stdout

    def text(self, line: str = "") -> None:
        """A line for people."""
        _write(self._people, _fitted(line, self._people))

    def relay(self, line: str, *, as_result: bool) -> None:
        """A line that the same command has written elsewhere, to stdout or stderr."""
        stream = sys.stdout if as_result else sys.stderr
        _write(stream, _fitted(line, stream))

    def hint(self, line: str) -> None:
        """A line on stderr."""
        _write(sys.stderr, _fitted(f"hint: {line}", sys.stderr))

    def data(self, document: Any) -> None:
        """The command's JSON document; nothing without ``--json``."""
        if self.as_json:
            _write(sys.stdout, json.dumps(document, indent=1, allow_nan=False) + "\n")

    def grids(self, *grids: Grid) -> None:
        """Tables for people."""
        # Written in one go by _write, which knows what to do when the reader is gone.
        _write(self._people, tables(grids, width=self.width, is_terminal=self._is_terminal))

    @property
    def width(self) -> int:
        """Columns of the terminal; piped output is cut only to COLUMNS, where that is set."""
        is_narrow = self._is_terminal or "COLUMNS" in os.environ
        return get_terminal_size().columns if is_narrow else _PIPE_COLUMNS

    @property
    def _is_terminal(self) -> bool:
        return self._people is not None and self._people.isatty()

    def error(self, error: MMPlanError) -> None:
        """An error line and its hint on stderr; with ``--json`` a document on stdout too."""
        detail = getattr(error, "detail", "").rstrip()
        said = _one_line(error.message)
        lines = [f"error: {said}", detail, f"hint: {error.hint}" if error.hint else ""]
        _write(sys.stderr, "".join(_fitted(line, sys.stderr) for line in lines if line))
        if error.documented:
            return
        self.data({"error": {key: getattr(error, key) for key in ("message", "hint", "exit_code")}})

    def progress(self, title: str, *, after_s: float = 0.0) -> closing[Progress]:
        """A progress bar on stderr with the time left; plain lines where there is no terminal."""
        return closing(Progress(title, after_s))


class Progress:
    """A bar on a terminal; elsewhere a line for each tenth, and for each half minute.

    Args:
        title: stands before the bar.
        after_s: seconds before it appears; what ends sooner shows nothing.
    """

    def __init__(self, title: str, after_s: float) -> None:
        self._title = title
        self._live: Any = None
        self._task: Any = None
        self._last, self._said_s = (0, -1), 0.0
        self._state: tuple[int, int | None, str] = 0, None, ""
        self._lock, self._timer = Lock(), Timer(after_s, self._show)
        self._shown = self._closed = False
        self._timer.daemon = True
        if after_s:
            self._timer.start()
        else:
            self._show()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Say how far it is."""
        with self._lock:
            self._state = done, total, _visible(note)
            if self._shown and not self._closed:
                self._draw()

    def close(self) -> None:
        """Take the bar down."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _show(self) -> None:
        with self._lock:
            if not self._closed:
                self._shown = True
                self._begin()
                self._draw()

    def _begin(self) -> None:
        if sys.stderr is None or not sys.stderr.isatty() or "NO_COLOR" in os.environ:
            return
        from rich import progress
        from rich.console import Console, RenderableType
        from rich.text import Text

        class NotedBar(progress.Progress):
            """A bar above its note: beside a long one, a bar has no room on 80 columns."""

            def get_renderables(self) -> Iterator[RenderableType]:
                yield self.make_tasks_table(self.tasks)
                yield from (Text(task.fields["note"]) for task in self.tasks if task.fields["note"])

        self._live = NotedBar(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=sys.stderr),
        )
        self._task = self._live.add_task(self._title, total=None, note="")
        self._live.start()

    def _draw(self) -> None:
        done, total, note = self._state
        if self._live is not None:
            self._live.update(self._task, completed=done, total=total, note=note)
        elif total is not None:
            tenth = 10 * done // max(total, 1)
            late = time.monotonic() - self._said_s > _LINE_S
            # What is counted anew, of another total, is told from its start.
            if late or self._last != (total, tenth):
                self._last, self._said_s = (total, tenth), time.monotonic()
                _write(sys.stderr, f"{self._title}: {done}/{total} {note}".rstrip() + "\n")


def tables(grids: Iterable[Grid], *, width: int, is_terminal: bool = False) -> str:
    """Tables as text.

    Args:
        grids: the tables; what is too wide continues below, beside the same keys.
        width: in characters.
        is_terminal: whether headings may have styles.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    page = StringIO()
    # In a notebook rich would show the tables by itself, whatever the file is.
    console = Console(
        file=page, width=width, force_terminal=is_terminal, force_jupyter=False, highlight=False
    )
    for grid in grids:
        console.print(Text(_visible(grid.title), style="table.title"))
        for chosen in _column_groups(grid, width):
            table = Table(box=box.SIMPLE_HEAD, show_header=any(grid.columns))
            for j in chosen:
                is_number = grid.columns[j].startswith(">")
                heading = Text(_visible(grid.columns[j].lstrip(">")))
                table.add_column(
                    heading, justify="right" if is_number else "left", no_wrap=is_number
                )
            for row in grid.rows:
                table.add_row(*(Text(_visible(row[j])) for j in chosen))
            console.print(table)
        if grid.note:
            console.print(Text(_visible(grid.note)))
    return page.getvalue()


def _column_groups(grid: Grid, width: int) -> list[list[int]]:
    """Columns that fit side by side; each group begins with the keys."""
    needed = [
        max(len(column.lstrip(">")), *(len(row[j]) for row in grid.rows), 1)
        for j, column in enumerate(grid.columns)
    ]
    needed = [
        n if column.startswith(">") else min(n, _TEXT_COLUMNS)
        for n, column in zip(needed, grid.columns, strict=True)
    ]
    keys = list(range(min(grid.keys, len(needed))))
    groups = [[*keys]]
    for j in range(len(keys), len(needed)):
        # Three spaces stand between columns, two on either side.
        is_full = sum(needed[i] + 3 for i in (*groups[-1], j)) + 1 > width
        if is_full and len(groups[-1]) > len(keys):
            groups.append([*keys])
        groups[-1].append(j)
    return groups


# What a terminal would obey: a name in a file may hold it.
_CONTROLS = {c: repr(chr(c))[1:-1] for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


# A value from a file that a message quotes may be longer.
_MOST_CHARACTERS = 1000


def _visible(text: str) -> str:
    return text.translate(_CONTROLS)


def _fitted(text: str, stream: IO[str] | None) -> str:
    """Lines that a terminal need not break inside a word; those of a pipe stay whole."""
    lines = _visible(text).split("\n")
    if stream is not None and stream.isatty():
        columns = get_terminal_size().columns
        lines = [_broken(line, columns) for line in lines]
    return "\n".join(lines) + "\n"


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    return fill(line, columns, break_long_words=False, break_on_hyphens=False)


def _one_line(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def _write(stream: IO[str] | None, text: str) -> None:
    """Write at once. A reader that went away (``| head``) does not end what the command does.

    Raises:
        UnfitEnvironmentError: the output is a file on a full disk.
    """
    if stream is None:  # closed by the caller (`>&-`)
        return
    encoding: str = getattr(stream, "encoding", None) or "utf-8"
    try:
        # A terminal that is not UTF-8 shows ? for the lines of a table.
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except OSError as error:
        # What is left in the buffer must go somewhere when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise UnfitEnvironmentError(
                f"the output cannot be written: {error.strerror}", hint="make room, then try again"
            ) from None
