"""Fulcrum's curves as figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fl_privacy.report.figures import Curve, curves
from fl_privacy.theory.fulcrum import Point


def sweep_figure(path: Path, found: Sequence[Point]) -> None:
    """Figure 3: the gap to uniform noise over eta, a line per graph."""
    lines = [
        Curve(name, [p.at for p in found if p.name == name], [p.allocation.gap for p in found if p.name == name])
        for name in dict.fromkeys(point.name for point in found)
    ]
    curves(path, "Uniform minus Fulcrum, paper_bound", "eta", "nats", lines)


def pareto_figure(path: Path, title: str, found: Sequence[Point]) -> None:
    """Figure 4: K* and K_uniform over the budget, two lines per window."""
    lines = []
    for name in dict.fromkeys(point.name for point in found):
        here = [point for point in found if point.name == name]
        budgets = [point.at for point in here]
        lines.append(Curve(f"Fulcrum, {name}", budgets, [point.allocation.bound for point in here]))
        lines.append(Curve(f"uniform, {name}", budgets, [point.allocation.uniform_bound for point in here]))
    curves(path, title, "budget U", "paper_bound, nats", lines, logarithmic=True)
