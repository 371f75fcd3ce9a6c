"""The report: a line per rank, a table for a terminal of 100 columns, preflight.json."""

import textwrap
from pathlib import Path
from typing import Any

from utils.console import say, warn
from utils.files import write_json
from utils.preflight.job import FAIL, PASS, WARN
from utils.preflight.runner import Entry

WIDTHS = (10, 11, 38, 36)  # check, result, what was seen, remedy: 98 with the gaps
WITHOUT_REMEDY = (10, 11, 75, 1)
RANK_COLUMNS = ("rank", "local", "host", "device", "samples", "parameters", "fingerprint")


def rank_lines(ranks: list[dict[str, Any]]) -> str:
    """The processes, one a line, right under their titles."""
    rows = [dict(zip(RANK_COLUMNS, RANK_COLUMNS, strict=True)), *ranks]
    cells = [[_cell(row[column]) for column in RANK_COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(entries: list[Entry]) -> str:
    """The checks, wrapped to 98 columns."""
    rows = [("check", "result", "what was seen", "remedy")]
    for entry in entries:
        result = entry.finding.result
        marked = result.upper() if result in (WARN, FAIL) else result
        rows.append((entry.check, marked, entry.finding.seen, entry.finding.remedy))
    lines = ["-" * 98]
    for number, row in enumerate(rows):
        widths = WIDTHS if row[-1] else WITHOUT_REMEDY
        cells = [textwrap.wrap(text, width) for text, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            parts = [cell[line] if line < len(cell) else "" for cell in cells]
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append(" ".join(padded).rstrip())
        if number == 0:
            lines.append("-" * 98)
    return "\n".join([*lines, "-" * 98])


def size_text(count: float) -> str:
    """Bytes, with three digits and a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def publish(
    directory: Path, ranks: list[dict[str, Any]], entries: list[Entry], seconds: float
) -> None:
    """Print the report and write RUN/preflight.json; for rank 0."""
    results = [entry.finding.result for entry in entries]
    say(table(entries))
    failed, warned, passed = (results.count(result) for result in (FAIL, WARN, PASS))
    say(
        f"preflight {'FAILED' if failed else 'passed'} in {seconds:.0f} s: {passed} pass, "
        f"{warned} warn, {failed} fail, {len(results) - passed - warned - failed} not checked or "
        f"not run; {directory / 'preflight.json'}"
    )
    content = {
        "ok": failed == 0,
        "seconds": seconds,
        "ranks": ranks,
        "checks": [
            {"check": entry.check, **entry.finding._asdict(), "seconds": round(entry.seconds, 3)}
            for entry in entries
        ],
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "preflight.json", content)
    except OSError as error:
        warn(f"preflight.json not written: {error}")
