"""Tasks of installed packages: what pins their code is a digest over all of the package's Python files."""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from fl_privacy.errors import ConfigError
from fl_privacy.tasks.task import TASKS


def files(name: str) -> dict[str, bytes]:
    """The Python files of the package that adds this task, by path."""
    points = [point for point in entry_points(group=TASKS.group) if point.name == name]
    if not points:
        known = ", ".join(TASKS) or "none is installed"
        raise ConfigError(f"task.name: {name!r} is not installed here; known: {known}")
    spec = find_spec(points[0].value.partition(":")[0].partition(".")[0])
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = {str(file.relative_to(root.parent)): file for root in roots for file in root.rglob("*.py")}
    if spec and spec.origin and not roots:  # a single module
        found = {Path(spec.origin).name: Path(spec.origin)}
    return {path: file.read_bytes() for path, file in sorted(found.items())}


def digest(name: str) -> str:
    """SHA-256 over the paths and contents of those files."""
    made = hashlib.sha256()
    for path, content in files(name).items():
        made.update(f"{hashlib.sha256(content).hexdigest()}  {path}\n".encode())
    return made.hexdigest()
