"""The result of a preflight check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty if all is well. One that is ok and has a fix is a warning."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
