"""results.json, report.md and the figures of an audit."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attacks.audit.run import plain, write_whole
from fl_privacy.report import figures, markdown
from fl_privacy.report.interval import mean_interval

Json = Mapping[str, Any]
TESTS = ("mean", "absolute", "half", "t_p", "tost_p")
PAIRS = (
    "One difference per seed. The t-test asks whether the mean is 0, TOST whether it is outside the margin: a p-value "
    "of TOST below 0.05 shows equivalence. With few seeds, neither shows much."
)


def write(out: Path, results: dict[str, Any]) -> None:
    results = plain(results)
    write_whole(out / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / "tables.csv", csv_of(results))
    drawn = draw(out / "figures", results)
    write_whole(out / "report.md", text(results, drawn))


def text(results: Json, drawn: Mapping[str, str]) -> str:
    """The report; `drawn` are the figures by the table or curve they show."""
    parts = [f"# {results['title'] or results['name']}", results["note"], _reading(results)]
    if results["failures"]:
        parts += ["## Not finished", *(f"- {f['cell']}, seed {f['seed']}: {f['reason']}" for f in results["failures"])]
    if results["unknown_measures"]:
        parts += ["## Not measured", *(f"- {line}" for line in results["unknown_measures"])]
    if results["claims"]:
        parts += ["## What holds and what does not", _claims(results)]
    if results.get("pairs"):
        parts += ["## Paired comparisons", _pairs_of(results), PAIRS]
    for table in results["tables"]:
        parts += [f"## {table['title']}", _table(table, results), table["note"], _image(drawn, table["id"])]
    curves = [name for name in drawn if name.startswith("curve-")]
    parts += ["## Curves" if curves else "", *(_image(drawn, name) for name in curves)]
    if results["measures"]:
        parts += ["## Measures", markdown.table(("measure", "meaning"), list(results["measures"].items()))]
    parts += ["## Machine and time", _machine(results)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _reading(results: Json) -> str:
    seeds, runs = len(results["seeds"]), results["runs"]
    interval = "mean ± half of the 95 % confidence interval over the seeds (Student's t)"
    how = interval if seeds > 1 else "value of one seed, so without a confidence interval"
    small = "This is the reduced audit: smaller federations, so expect weaker effects. " if results["reduced"] else ""
    return (
        f"{small}{runs['finished']} of {runs['planned']} runs are finished. A number is the {how}. "
        "Below it stand the paper's number (± its own spread) and what guessing would reach, where there is one."
    )


def csv_of(results: Json) -> str:
    """Every number of every table in a line of its own."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["table", "row", "column", "cell", "measure", "group", "mean", "half", "seeds", "chance", "paper"])
    for table in results["tables"]:
        for row in table["rows"]:
            for column, entry in zip(table["columns"], row["entries"], strict=True):
                where = (entry[name] for name in ("cell", "measure", "group", "mean", "half", "n", "chance"))
                paper = entry["paper"] or {}
                out.writerow([table["id"], row["title"], column, *where, paper.get("mean", paper.get("text"))])
    return text.getvalue()


def _claims(results: Json) -> str:
    rows = []
    for claim in results["claims"]:
        sides = [claim[side] for side in ("left", "right")]
        numbers = [
            markdown.NOTHING if side["mean"] is None else f"{markdown.number(side['mean'])} ({side['cell']})"
            for side in sides
        ]
        one = " (one seed)" if claim["seeds"] == 1 else ""
        relation = "<" if claim["within"] is None else f"within {claim['within']:g}"
        rows.append([claim["text"], f"{numbers[0]} {relation} {numbers[1]}", f"**{claim['verdict']}**{one}"])
    return markdown.table(("what the paper says", "here", ""), rows)


def _pairs_of(results: Json) -> str:
    columns = ("left less right", "measure", "mean", "mean size", "± (95 %)", "paired t, p", "margin", "TOST, p", "n")
    rows = []
    for one in results["pairs"]:
        tests = [markdown.NOTHING if one.get(name) is None else markdown.number(one[name]) for name in TESTS]
        rows.append([one["title"], one["measure"], *tests[:4], f"{one['margin']:g}", tests[4], str(one["n"])])
    return markdown.table(columns, rows)


def _table(table: Json, results: Json) -> str:
    lines: list[list[str]] = []
    for row in table["rows"]:
        entries = row["entries"]
        lines.append([f"**{row['title']}**", *(_ours(entry) for entry in entries)])
        if any(entry["paper"] for entry in entries):
            lines.append(["paper", *(_papers(entry["paper"]) for entry in entries)])
        if any(entry["chance"] is not None for entry in entries):
            lines.append(["chance", *(markdown.number(entry["chance"]) for entry in entries)])
    return markdown.table([table["corner"], *table["columns"]], lines)


def _ours(entry: Json) -> str:
    if entry["mean"] is None:
        return markdown.NOTHING if entry["planned"] == 0 else "missing"
    found = markdown.spread(entry["mean"], entry["half"])
    partly = f" ({entry['n']} of {entry['planned']} seeds)" if entry["n"] < entry["planned"] else ""
    return f"**{found}**{partly}"


def _papers(paper: Json | None) -> str:
    if paper is None:
        return markdown.NOTHING
    return str(paper["text"]) if "text" in paper else markdown.spread(paper["mean"], paper["spread"])


def _image(drawn: Mapping[str, str], name: str) -> str:
    return f"![{name}](figures/{drawn[name]})" if name in drawn else ""


def _machine(results: Json) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}. {versions}. "
        f"Attack suite {results['suite']}. All runs together took {results['seconds'] / 60:.1f} minutes."
    ]
    rows = []
    for name, cell in results["cells"].items():
        took = list(cell["seconds"].values())
        rows.append([name, str(len(took)), markdown.number(mean_interval(took)[0]) if took else markdown.NOTHING])
    return "\n\n".join([*lines, markdown.table(("cell", "runs", "seconds each"), rows)])


def draw(folder: Path, results: Json) -> dict[str, str]:
    """All figures that have something to show: name to file."""
    drawn = {}
    for table in results["tables"]:
        if any(entry["mean"] is not None for row in table["rows"] for entry in row["entries"]):
            drawn[table["id"]] = f"{table['id']}.svg"
            PLOTS[table.get("plot", "bars")](folder / drawn[table["id"]], table)
    for attack, name in sorted({found[:2] for found in _curves(results)}):
        mark = "curve-" + re.sub(r"[^a-z0-9]+", "-", f"{attack}-{name}".lower()).strip("-")
        lines = [(cell, curve) for a, n, cell, curve in _curves(results) if (a, n) == (attack, name)]
        shown = [figures.Curve(cell, *_mean_curve(curve)) for cell, curve in lines]
        drawn[mark] = f"{mark}.svg"
        first = lines[0][1][0]
        x_label, y_label = str(first.get("x_label", "epsilon")), str(first.get("y_label", name))
        figures.curves(folder / drawn[mark], f"{name} ({attack})", x_label, y_label, shown)
    return drawn


def _bars(path: Path, table: Json) -> None:
    series = [figures.Series(row["title"], [_bar(e) for e in row["entries"]]) for row in table["rows"]]
    figures.bars(path, table["title"], table["columns"], series, "paper")


def _lines(path: Path, table: Json) -> None:
    """A line for each column over the rows, and its chance."""
    shown = []
    for index, column in enumerate(table["columns"]):
        for name, title in (("mean", column), ("chance", f"{column}, chance")):
            found = [(x, row["entries"][index][name]) for x, row in enumerate(table["rows"])]
            there = [(float(x), y) for x, y in found if y is not None]
            if there:
                shown.append(figures.Curve(title, [x for x, _ in there], [y for _, y in there]))
    ticks = [row["title"] for row in table["rows"]]
    figures.curves(path, table["title"], table["corner"], "", shown, ticks, table.get("logarithmic", False))


def _points(path: Path, table: Json) -> None:
    """A point for each row: its first column against its second."""
    found = [(row["title"], *(entry["mean"] for entry in row["entries"][:2])) for row in table["rows"]]
    there = [(title, x, y) for title, x, y in found if x is not None and y is not None]
    figures.points(path, table["title"], table["columns"][0], table["columns"][1], there)


PLOTS = {"bars": _bars, "lines": _lines, "points": _points}


def _bar(entry: Json) -> figures.Bar:
    paper = (entry["paper"] or {}).get("mean")
    return figures.Bar(entry["mean"], entry["half"], entry["chance"], paper)


def _curves(results: Json) -> Iterator[tuple[str, str, str, list[Json]]]:
    """Attack, curve, cell, and the curve of each seed."""
    for cell, found in results["cells"].items():
        seeds = list(found["curves"].values())
        for attack, name in dict.fromkeys((a, n) for seed in seeds for a, curves in seed.items() for n in curves):
            curves = [seed[attack][name] for seed in seeds if name in seed.get(attack, {})]
            if drawable := [curve for curve in curves if _pairs(curve)]:
                yield attack, name, cell, drawable


def _pairs(curve: Any) -> dict[float, float]:
    """`{x: [...], y: [...]}`, or y by x; whatever else an attack calls a curve is kept and not drawn."""
    if not isinstance(curve, Mapping):
        return {}
    listed = "x" in curve and "y" in curve
    try:
        pairs = zip(curve["x"], curve["y"], strict=True) if listed else curve.items()
        return {float(x): float(y) for x, y in pairs if y is not None}
    except (TypeError, ValueError):
        return {}


def _mean_curve(curves: list[Json]) -> tuple[list[float], list[float]]:
    points = [_pairs(curve) for curve in curves]
    x = sorted({value for one in points for value in one})
    return x, [mean_interval([one[value] for one in points if value in one])[0] for value in x]
