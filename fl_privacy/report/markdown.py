"""Markdown tables and numbers."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "–"


def number(value: float | None) -> str:
    """Three decimals, or three significant digits for very small or large values."""
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.3g}"


def spread(mean: float | None, half: float | None) -> str:
    return number(mean) if mean is None or half is None else f"{number(mean)} ± {number(half)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with the first column left-aligned and the others right-aligned."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in (header, rule, *rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
