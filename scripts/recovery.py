"""Writes the table of docs/recovery.md from the results of `make test-faults`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "recovery.md"
RESULTS = ROOT / "build" / "faults.jsonl"
BEGIN, END = "<!-- made by make test-faults -->\n", "<!-- end -->\n"
HEAD = "| killed | at | in | model | charges beyond one per round |\n|---|---|---|---|---|\n"
ENGINES = {
    "shuffler": "a local run, shuffler",
    "shards": "a local run, shards",
    "kits": "kits, shuffler",
    "kits of shards": "kits, shards",
    "mixes": "a local run, mixes",
    "regions": "a local run, hierarchical",
    "residents": "a local run, sites aggregate",
    "kits of residents": "kits, sites aggregate",
}


Row = dict[str, Any]


def whole(rows: list[Row]) -> Iterator[Row]:
    """The faults of a process, which happened in several runs."""
    for process in sorted({str(row["process"]) for row in rows}):
        own = sorted((row for row in rows if row["process"] == process), key=lambda row: int(row["first"]))
        phases = [phase for row in own for phase in row["phases"]]
        yield {**own[0], "phases": ", ".join(phases), "extra": sum(row["extra"] for row in own)}


def table(rows: list[Row]) -> str:
    line = "| {process} | {phases} | {engine} | the same bits | {extra} |\n"
    return HEAD + "".join(line.format(**row, engine=ENGINES[row["where"]]) for row in whole(rows))


def main() -> int:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    text = DOCS.read_text()
    part = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    DOCS.write_text(part.sub(lambda _: BEGIN + table(rows) + END, text))
    print(f"{DOCS.relative_to(ROOT)}: {len(rows)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
