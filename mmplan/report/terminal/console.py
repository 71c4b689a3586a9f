"""The one place that prints: tables and text for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from io import StringIO
from threading import Lock, Timer
from typing import IO, Any

from mmplan.errors import MMPlanError, UnfitEnvironmentError


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
    def _people(self) -> IO[str] | None:
        return sys.stderr if self.as_json else sys.stdout

    def text(self, line: str = "") -> None:
        """A line for people."""
        _write(self._people, f"{_visible(line)}\n")

    def relay(self, line: str, *, as_result: bool) -> None:
        """A line that the same command has written elsewhere, to stdout or stderr."""
        _write(sys.stdout if as_result else sys.stderr, f"{_visible(line)}\n")

    def hint(self, line: str) -> None:
        """A line on stderr."""
        _write(sys.stderr, f"hint: {_visible(line)}\n")

    def data(self, document: Any) -> None:
        """The command's JSON document; nothing without ``--json``."""
        if self.as_json:
            _write(sys.stdout, json.dumps(document, indent=1, allow_nan=False) + "\n")

    def grids(self, *grids: Grid) -> None:
        """Tables for people."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # Piped output is not cut to a terminal's width. Written in one go by _write, which
        # knows what to do when the reader is gone.
        is_terminal = self._people is not None and self._people.isatty()
        page = StringIO()
        console = Console(
            file=page,
            width=None if is_terminal else 200,
            force_terminal=is_terminal,
            highlight=False,
        )
        for grid in grids:
            title = Text(_visible(grid.title), style="table.title")
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for column in grid.columns:
                heading = Text(_visible(column.lstrip(">")))
                table.add_column(heading, justify="right" if column.startswith(">") else "left")
            for row in grid.rows:
                table.add_row(*(Text(_visible(cell)) for cell in row))
            console.print(table)
            if grid.note:
                console.print(Text(_visible(grid.note)))
        _write(self._people, page.getvalue())

    def error(self, error: MMPlanError) -> None:
        """An error line and its hint on stderr; with ``--json`` a document on stdout too."""
        detail = getattr(error, "detail", "").rstrip()
        said = _one_line(error.message)
        lines = [f"error: {said}", detail, f"hint: {error.hint}" if error.hint else ""]
        _write(sys.stderr, "".join(f"{_visible(line)}\n" for line in lines if line))
        if error.documented:
            return
        self.data({"error": {key: getattr(error, key) for key in ("message", "hint", "exit_code")}})

    def progress(self, title: str, *, after_s: float = 0.0) -> closing[Progress]:
        """A progress bar on stderr with the time left; plain lines where there is no terminal."""
        return closing(Progress(title, after_s))


class Progress:
    """A bar on a terminal; a line now and then elsewhere.

    Args:
        title: stands before the bar.
        after_s: seconds before it appears; what ends sooner shows nothing.
    """

    def __init__(self, title: str, after_s: float) -> None:
        self._title = title
        self._live: Any = None
        self._task: Any = None
        self._last = 0, -1
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
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._live = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
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
            # What is counted anew, of another total, is told from its start.
            if self._last != (total, tenth):
                self._last = total, tenth
                _write(sys.stderr, f"{self._title}: {done}/{total} {note}".rstrip() + "\n")


# What a terminal would obey: a name in a file may hold it.
_CONTROLS = {c: repr(chr(c))[1:-1] for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


# A value from a file that a message quotes may be longer.
_MOST_CHARACTERS = 1000


def _visible(text: str) -> str:
    return text.translate(_CONTROLS)


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
