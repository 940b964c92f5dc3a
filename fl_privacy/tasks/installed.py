"""Tasks of installed packages: what pins their code is a digest over all of the package's Python files."""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points

from fl_privacy.errors import ConfigError
from fl_privacy.tasks.task import TASKS


def files(name: str) -> dict[str, bytes]:
    """The Python files of the package that adds this task, by path."""
    points = [point for point in entry_points(group=TASKS.group) if point.name == name]
    package = points[0].dist if points else None
    if package is None:
        known = ", ".join(TASKS) or "none is installed"
        raise ConfigError(f"task.name: {name!r} is not installed here; known: {known}")
    listed = package.files or []
    found = {str(file): file.locate() for file in listed if file.suffix == ".py"}
    if not found:  # an editable install lists no files of its own
        from importlib.util import find_spec
        from pathlib import Path

        spec = find_spec(points[0].value.partition(":")[0].partition(".")[0])
        roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
        found = {str(p.relative_to(Path(root).parent)): p for root in roots for p in Path(root).rglob("*.py")}
    return {path: file.read_bytes() for path, file in sorted(found.items())}  # type: ignore[union-attr]


def digest(name: str) -> str:
    """SHA-256 over the paths and contents of those files."""
    made = hashlib.sha256()
    for path, content in files(name).items():
        made.update(f"{hashlib.sha256(content).hexdigest()}  {path}\n".encode())
    return made.hexdigest()
