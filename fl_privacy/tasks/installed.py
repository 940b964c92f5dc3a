"""Tasks of installed packages: what pins their code is a digest over everything that Python can import from them."""

from __future__ import annotations

import hashlib
from importlib.machinery import all_suffixes
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from fl_privacy.errors import ConfigError
from fl_privacy.tasks.task import TASKS

CODE = tuple(all_suffixes())  # also of compiled modules
CACHE = "__pycache__"  # Python makes it from the files


def listing(name: str) -> str:
    """SHA-256 and path of every file of code in the package that adds this task, as `sha256sum` writes them."""
    points = [point for point in entry_points(group=TASKS.group) if point.name == name]
    if not points:
        known = ", ".join(TASKS) or "none is installed"
        raise ConfigError(f"task.name: {name!r} is not installed here; known: {known}")
    spec = find_spec(points[0].value.partition(":")[0].partition(".")[0])
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = {file.relative_to(root.parent).as_posix(): file for root in roots for file in root.rglob("*")}
    if spec and spec.origin and not roots:  # a single module
        found = {Path(spec.origin).name: Path(spec.origin)}
    code = [path for path in sorted(found) if path.endswith(CODE) and CACHE not in path.split("/")]
    return "".join(f"{hashlib.sha256(found[path].read_bytes()).hexdigest()}  {path}\n" for path in code)


def digest(name: str) -> str:
    """SHA-256 over the listing."""
    return hashlib.sha256(listing(name).encode()).hexdigest()


def pinned(name: str, sha256: str | None) -> str:
    """The listing, if it has this digest; nothing of the package is imported for it."""
    found = listing(name)
    if hashlib.sha256(found.encode()).hexdigest() != sha256:
        raise ConfigError(f"task.name: {name!r} is installed here in another version than the federation's; update it")
    return found
