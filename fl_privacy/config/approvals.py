"""Runs that a site's operator approved. A policy with `approve_runs: true` lets no other run start here."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from fl_privacy.config.federation import Federation
from fl_privacy.config.policy import PolicyError
from fl_privacy.errors import ConfigError
from fl_privacy.files import replace, write_public

FOLDER = "approved"  # in a site's state folder: one file per run, with the digest of its config
LAST = "last.yaml"  # the config of the run that was approved last
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def approve(run: str, federation: Federation, state: Path) -> None:
    """Let this site take part in a run, under this config."""
    folder = state / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace(folder / _checked(run), federation.digest.encode(), mode=0o600)
    write_public(folder / LAST, federation.to_yaml().encode())


def check(run: str, federation: Federation, state: Path) -> None:
    """Raise unless the run was approved under exactly this config."""
    file = state / FOLDER / _checked(run)
    if not file.is_file() or file.read_text() != federation.digest:
        raise PolicyError(f"policy: run {run} is not approved here; use `fl-privacy site approve KIT {run}`")


def changes(federation: Federation, state: Path) -> str:
    """A diff from the config approved last to this one; empty if there is none or it is the same."""
    try:
        before = (state / FOLDER / LAST).read_text().splitlines(keepends=True)
    except OSError:
        return ""
    now = federation.to_yaml().splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, now, "approved last", "now"))


def _checked(run: str) -> str:
    if not RUN.fullmatch(run) or run == LAST:
        raise ConfigError(f"run: {run!r} is not the name of a run; use the name that `site status` shows")
    return run
