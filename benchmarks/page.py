"""Tables, and the page in docs that keeps them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import mmplan
from mmplan.schema.base import write_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def check_tree(package: Path) -> None:
    """Refuse to measure an mmplan of another folder than these benchmarks'.

    Args:
        package: the folder of the mmplan that was imported.

    Raises:
        SystemExit: it is another one.
    """
    if package.resolve().parent != ROOT:
        raise SystemExit(
            f"{ROOT / 'benchmarks'} would measure {package}; set PYTHONPATH={ROOT}, "
            "or install that folder"
        )


check_tree(Path(mmplan.__file__).parent)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too; text to the left."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(_padded(text, width, i) for i, (text, width) in enumerate(pairs)) + " |"
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _padded(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def conditions(load_before: float) -> str:
    """Where, when and how quietly it was measured, in one sentence.

    Args:
        load_before: load average of the last minute when the benchmark began; what the
            benchmark adds itself would hide others'.
    """
    cores = os.cpu_count() or 1
    busy = "" if load_before < 0.5 else ", so others used the cores too: not a quiet machine"
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {_processor()}, {cores} cores; "
        f"torch {torch.__version__}, gloo over loopback, one compute thread a process; "
        f"load average before the start {load_before:.1f}{busy}."
    )


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def write_section(name: str, text: str, *, page: Path = PAGE) -> None:
    """Replace what stands between a section's markers; a new section goes to the end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section, old, count=1)
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    write_text(page, new)
