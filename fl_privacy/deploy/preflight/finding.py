"""What a check before a start has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty where all is well."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
