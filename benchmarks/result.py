"""A measurement with its limit, and the files and tables that hold the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "results"
Better = Literal["lower", "higher"]
SIGNS: dict[Better, str] = {"lower": "<=", "higher": ">="}


@dataclass(frozen=True)
class Result:
    """One measurement; `better` says on which side of the limit it should be."""

    name: str
    value: float
    limit: float
    unit: str
    better: Better = "lower"
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "MISSED"

    @property
    def bound(self) -> str:
        return f"{SIGNS[self.better]} {self.limit:.5g}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        return cls(**{name: value for name, value in values.items() if name != "ok"})


def line(result: Result, judged: bool = True) -> str:
    """Name, value and unit; with `judged` also the limit and whether the value meets it."""
    verdict = f"{result.bound:<10} {result.verdict}" if judged else "not judged"
    return f"{result.name:<40} {result.value:>10.4g} {result.unit:<16} {verdict}"


def save(benchmark: str, results: Sequence[Result], machine: dict[str, str]) -> None:
    """One file per benchmark, with the machine it was measured on."""
    FOLDER.mkdir(exist_ok=True)
    content = {"benchmark": benchmark, "machine": machine, "results": [result.to_dict() for result in results]}
    (FOLDER / f"{benchmark}.json").write_text(json.dumps(content, indent=2) + "\n")


def write_readme(benchmarks: Sequence[str]) -> None:
    """Write all saved results to one page; benchmarks measured on the same machine and day share a table."""
    saved = [json.loads(path.read_text()) for name in benchmarks if (path := FOLDER / f"{name}.json").exists()]
    text = ["# Results", "", "Written by `make bench`; docs/benchmarks.md says what each line means.", ""]
    machines: list[dict[str, str]] = []
    for run in saved:
        if run["machine"] not in machines:
            machines.append(run["machine"])
    for machine in machines:
        text += [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
        text += ["| benchmark | measured | limit | |", "|---|---|---|---|"]
        for run in saved:
            if run["machine"] == machine:
                text += [_row(Result.from_dict(values)) for values in run["results"]]
        text.append("")
    (FOLDER / "README.md").write_text("\n".join(text))


def _row(result: Result) -> str:
    return f"| {result.name} | {result.value:.4g} {result.unit} | {result.bound} | {result.verdict} |"
