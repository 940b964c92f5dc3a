"""What a Task class says about itself: checked when it is loaded, and reported at its line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

PREPROCESSING = ("public", "local")
SOURCE = "__source__"  # of a module that was made from text


def problem(kind: type[Any]) -> tuple[str, str]:
    """The first member that is not what a task may say, and why; empty if there is none."""
    return next(_problems(kind), ("", ""))


def _problems(kind: type[Any]) -> Iterator[tuple[str, str]]:
    options, preprocessing, classes, needs = kind.Options, kind.preprocessing, kind.classes, kind.needs_data
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        yield "Options", f"{_shown(options)} was given; make it a class of pydantic.BaseModel"
    if preprocessing not in PREPROCESSING:
        yield "preprocessing", f"{_shown(preprocessing)} was given; use 'public' or 'local'"
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 0):
        yield "classes", f"{_shown(classes)} was given; use the number of classes, or 0 to predict a number"
    if classes == 1:
        yield "classes", "1 was given; use 2 or more, or 0 to predict a number"
    if not isinstance(needs, bool):
        yield "needs_data", f"{_shown(needs)} was given; use True or False"


def _shown(value: Any) -> str:
    return repr(value)[:60]


def where(kind: type[Any], member: str, label: str) -> str:
    """File and line at which the class says it, or begins; of a module that was not made from text only its label."""
    source = getattr(sys.modules.get(kind.__module__), SOURCE, None)
    if source is None:
        return label
    own = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    lines = [part.lineno for node in own for part in node.body if member in _named(part)]
    return f"{label}:{[*lines, *(node.lineno for node in own), 1][0]}"


def _named(part: ast.stmt) -> list[str]:
    """The names that a statement of a class gives something to."""
    if isinstance(part, ast.ClassDef | ast.FunctionDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
