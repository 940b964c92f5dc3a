"""The runs of a folder: found by name or path, and listed. Nothing heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fl_privacy.errors import TranscriptError
from fl_privacy.ops.status import Status, read

RUNS = Path("runs")
SHOWN = 5  # names in an error message
PARTS = ("manifest.json", "views", "logs")  # a folder with one of these is a run, perhaps a damaged one


def find(run: str | Path, runs_dir: Path = RUNS) -> Path:
    """The folder of a run, given as its name in `runs_dir` or as its path; a miss shows the closest names."""
    text, path = str(run), Path(run)
    is_name = path.name == text
    if is_name and _is_run(runs_dir / text):
        return runs_dir / text
    if path.name and _is_run(path):
        return path
    folder = runs_dir if is_name else path.parent
    what = "not a run (no manifest.json, no logs)" if path.is_dir() else f"no such run in {folder}"
    raise TranscriptError(f"{text}: {what}; {_instead(path.name, folder)}")


def folders(runs_dir: Path = RUNS) -> list[Path]:
    """The run folders in `runs_dir`, newest first; one that runs in containers has only its state so far."""
    names = {path.name for path in _folders_in(runs_dir)} | {path.name for path in _folders_in(runs_dir / ".state")}
    return sorted((runs_dir / name for name in names if _is_run(runs_dir / name)), key=_made, reverse=True)


@dataclass(frozen=True)
class Summary:
    """One line of `fl-privacy runs`; `size` is in bytes on disk, `rounds` is None if no config is there yet."""

    run: str
    path: str
    federation: str
    route: str
    round: int
    rounds: int | None
    status: str
    score: dict[str, float]
    size: int
    created: str


def summaries(runs_dir: Path = RUNS) -> list[Summary]:
    """All runs in `runs_dir`, newest first; a damaged one is listed too."""
    return [_summary(path) for path in folders(runs_dir)]


def _summary(path: Path) -> Summary:
    try:
        found = read(path)
    except TranscriptError:
        found = Status(path.name, str(path), "damaged")
    names = found.federation, found.route
    return Summary(
        path.name, str(path), *names, found.round, found.rounds, found.state, found.score, _size(path), found.created
    )


def _is_run(path: Path) -> bool:
    if (path.parent / ".state" / path.name / "compose.yaml").is_file():
        return True
    return any((path / part).exists() for part in PARTS) and not (path / "kit.yaml").exists()


def _folders_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _made(path: Path) -> tuple[float, str]:
    there = path if path.exists() else path.parent / ".state" / path.name
    return there.stat().st_mtime, path.name


def _instead(name: str, folder: Path) -> str:
    names = [path.name for path in folders(folder)]
    if not names:
        return "start one with fl-privacy up CONFIG, or give the path of a run"
    close = [known for known in names if known.startswith(name) and name] or get_close_matches(name, names, SHOWN, 0.5)
    if close:
        return f"did you mean {' or '.join(close[:SHOWN])}?"
    return f"runs there: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"


def _size(path: Path) -> int:
    """Bytes of all files; a file that vanishes meanwhile does not count."""
    return sum(_sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
