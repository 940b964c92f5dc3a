"""From finished runs to numbers: per seed, mean, interval, chance and the paper's, table by table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attacks.audit.claims import checked
from attacks.audit.matrix import Audit, Number, Paper, Place, Table
from attacks.audit.pairs import compared
from attacks.audit.run import Failure, Store, key
from attacks.version import SUITE
from fl_privacy.report import machine
from fl_privacy.report.interval import mean_interval

FORMAT = 1
Records = Mapping[str, Mapping[int, dict[str, Any]]]


def collect(audit: Audit, store: Store, failures: Sequence[Failure]) -> dict[str, Any]:
    """Everything that results.json holds; the report and the figures are made from it alone."""
    records = _records(audit, store)
    runs = {key(job): record for job in audit.jobs if (record := store.read(job))}
    tables = [_table(audit, records, table) for table in audit.matrix.tables]
    return {
        "format": FORMAT,
        "name": audit.name,
        "title": audit.matrix.title,
        "note": audit.matrix.note,
        "reduced": audit.reduced,
        "suite": SUITE,
        "machine": machine.facts(),
        "versions": machine.versions(),
        "runs": {"planned": len({key(job) for job in audit.jobs}), "finished": len(runs)},
        "seconds": round(sum(record["seconds"] for record in runs.values()), 1),
        "seeds": list(dict.fromkeys(job.seed for job in audit.jobs)),
        "failures": [asdict(failure) for failure in failures],
        "unknown_measures": _unknown(audit, records),
        "measures": audit.matrix.measures,
        "tables": tables,
        "claims": [
            checked(claim, _by_seed(records, claim.left), _by_seed(records, claim.right))
            for claim in audit.matrix.claims
        ],
        "pairs": [compared(pairs, lambda number: _by_seed(records, number)) for pairs in audit.matrix.pairs],
        "matrix": audit.matrix.model_dump(mode="json", exclude_none=True),
        "cells": {name: _cell(audit, name, records[name]) for name in audit.cells},
    }


def _by_seed(records: Records, number: Number) -> dict[str, float]:
    """A claim's number in every run that has it."""
    found = {}
    for seed, record in records.get(number.cell, {}).items():
        measure = _measure(record, number.measure) or {}
        groups = measure.get("groups") or {}
        value = measure.get("chance") if number.chance else measure.get("value")
        value = groups.get(number.group) if number.group is not None else value
        if isinstance(value, int | float):
            found[str(seed)] = float(value)
    return found


def _records(audit: Audit, store: Store) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in audit.cells}
    for job in audit.jobs:
        record = store.read(job)
        if record is not None:
            found[job.cell][job.seed] = record
    return found


def _measure(record: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """`name` of the run or of the first attack that has it; `attack/name` of that attack."""
    source, _, measure = name.rpartition("/")
    sources = record["measures"]
    for one in [source] if source else sources:
        if measure in sources.get(one, {}):
            found: Mapping[str, Any] = sources[one][measure]
            return found
    return None


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float)]


def summary(records: Mapping[int, Mapping[str, Any]], measure: str, group: str | None = None) -> dict[str, Any]:
    """A measure over the seeds; a seed that has no number of it does not count."""
    found = {seed: m for seed, record in records.items() if (m := _measure(record, measure)) is not None}
    per_seed = {
        str(seed): (m.get("groups") or {}).get(group) if group is not None else m.get("value")
        for seed, m in found.items()
    }
    values, chances = _numbers(per_seed.values()), _numbers(m.get("chance") for m in found.values())
    mean, half = mean_interval(values) if values else (None, None)
    return {
        "per_seed": per_seed,
        "n": len(values),
        "mean": mean,
        "half": half,
        "chance": mean_interval(chances)[0] if chances else None,
    }


def _paper(paper: Paper) -> dict[str, Any] | None:
    if paper is None:
        return None
    if isinstance(paper, str):
        return {"text": paper}
    mean, spread = paper if isinstance(paper, tuple) else (paper, None)
    return {"mean": mean, "spread": spread}


def _table(audit: Audit, records: Records, table: Table) -> dict[str, Any]:
    return {
        "id": table.id,
        "title": table.title,
        "note": table.note,
        "corner": table.corner,
        "columns": [column.title for column in table.columns],
        "plot": table.plot,
        "logarithmic": table.logarithmic,
        "rows": [
            {"title": row.title, "entries": [_entry(audit, records, place) for place in table.places(row)]}
            for row in table.rows
        ],
    }


def _entry(audit: Audit, records: Records, place: Place) -> dict[str, Any]:
    where = {"cell": place.cell, "measure": place.measure, "group": place.group, "paper": _paper(place.paper)}
    if place.computed is not None:
        return {**where, "planned": 0, **summary({}, ""), "mean": place.computed}
    planned = sum(job.cell == place.cell for job in audit.jobs)
    if place.cell is None or place.measure is None:
        return {**where, "planned": 0, **summary({}, "")}
    return {**where, "planned": planned, **summary(records.get(place.cell, {}), place.measure, place.group)}


def _unknown(audit: Audit, records: Records) -> list[str]:
    """Numbers that a table asks for and that no run of their cell has: most likely a misspelt name."""
    places = [(table.id, p) for table in audit.matrix.tables for row in table.rows for p in table.places(row)]
    found = []
    for table, place in places:
        seen = list(records.get(place.cell or "", {}).values())
        if not seen or place.measure is None or any(_has(record, place) for record in seen):
            continue
        measure = next((m for record in seen if (m := _measure(record, place.measure)) is not None), None)
        if measure is None:
            what, there = (
                f"measure {place.measure!r}",
                {n for r in seen for names in r["measures"].values() for n in names},
            )
        else:
            what, there = f"group {place.group!r} of {place.measure}", set(measure.get("groups") or {})
        found.append(f"{table}: cell {place.cell} has no {what}; it has {', '.join(sorted(there)) or 'none'}")
    return list(dict.fromkeys(found))


def _has(record: Mapping[str, Any], place: Place) -> bool:
    measure = _measure(record, place.measure or "")
    return measure is not None and (place.group is None or place.group in (measure.get("groups") or {}))


def _cell(audit: Audit, name: str, records: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    measures = {
        f"{source}/{measure}": sorted({g for r in records.values() for g in _groups(r, source, measure)})
        for record in records.values()
        for source, there in record["measures"].items()
        for measure in there
    }
    return {
        "federation": audit.matrix.federation(name, audit.size),
        "attacks": next((record["attacks"] for record in records.values()), []),
        "seconds": {str(seed): record["seconds"] for seed, record in records.items()},
        "measures": {
            name: {**summary(records, name), "groups": {g: summary(records, name, g) for g in groups}}
            for name, groups in measures.items()
        },
        "curves": {str(seed): record["curves"] for seed, record in records.items() if record["curves"]},
    }


def _groups(record: Mapping[str, Any], source: str, measure: str) -> Iterable[str]:
    return (record["measures"].get(source, {}).get(measure, {}).get("groups") or {}).keys()
