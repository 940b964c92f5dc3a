"""Which task code a site runs: only what its operator accepted, or its policy lists. A run can never ship code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fl_privacy.errors import ConfigError
from fl_privacy.files import write_public
from fl_privacy.visible import visible

if TYPE_CHECKING:
    from fl_privacy.config import Federation

FOLDER = "tasks"  # in a site's state folder: the code that was accepted, by digest
LAST = "last"


def text_of(federation: Federation) -> str:
    """The code that is pinned: the file, or the list of an installed package's files with their digests."""
    task = federation.task
    if task.name is None:
        return task.source or ""
    from fl_privacy.tasks.installed import pinned

    return pinned(task.name, task.sha256)


def offered(federation: Federation, state: Path) -> str:
    """What an operator reads before accepting: what changed since the last accepted version, or all of the code."""
    return changes(federation, state) or visible(text_of(federation))


def accept(federation: Federation, state: Path) -> None:
    """Remember that this code may run here."""
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    sha256 = str(federation.task.sha256)
    write_public(folder / f"{sha256}.txt", text_of(federation).encode())
    write_public(folder / LAST, sha256.encode())


def check(federation: Federation, state: Path | None, listed: tuple[str, ...] = ()) -> None:
    """Refuse a task's code that this site has not accepted; `listed` are the digests in its policy."""
    task = federation.task
    if not task.is_own or task.sha256 in listed:
        return
    if state is None or not (state / FOLDER / f"{task.sha256}.txt").is_file():
        fix = "read it and run `fl-privacy site accept-task KIT`, or add the digest to `code` in the policy"
        raise ConfigError(f"task: {task.label} (sha256 {task.sha256}) is not accepted at this site; {fix}")


def check_here(federation: Federation, states: Iterable[Path]) -> None:
    """Refuse a task's code that no site on this machine, by its state folder, has accepted."""
    task = federation.task
    if task.is_own and not any(may_run(federation, state) for state in states):
        raise ConfigError(f"task: no site here accepted {task.label} (sha256 {task.sha256}), so it is not run")


def may_run(federation: Federation, state: Path) -> bool:
    """Whether a site with this state folder runs the task's code."""
    try:
        check(federation, state)
    except ConfigError:
        return False
    return True


def changes(federation: Federation, state: Path) -> str:
    """A diff from the code accepted last to this one; empty if there is none or it is the same."""
    folder, now = state / FOLDER, str(federation.task.sha256)
    try:
        before = (folder / LAST).read_text().strip()
        old = (folder / f"{before}.txt").read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    was, is_now = (visible(text).splitlines() for text in (old, text_of(federation)))
    return "\n".join(difflib.unified_diff(was, is_now, f"accepted {before[:12]}", f"offered {now[:12]}", lineterm=""))
