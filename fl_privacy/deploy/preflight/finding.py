"""The result of a preflight check."""

from __future__ import annotations

from dataclasses import dataclass

from fl_privacy.errors import DataProblems, FederationError


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty if all is well or the detail has it. One that is ok and has a fix is a warning."""

    name: str
    ok: bool
    detail: str
    fix: str = ""

    @classmethod
    def failed(cls, name: str, error: FederationError, fix: str) -> Check:
        """From an error; the problems of files have a fix each."""
        detail = "\n".join(error.lines).removeprefix(f"{name}: ")
        return cls(name, False, detail, "" if isinstance(error, DataProblems) else fix)

    @property
    def problem(self) -> str:
        """In one line."""
        fix = f" (fix: {self.fix})" if self.fix else ""
        return f"{self.name}: {'; '.join(self.detail.splitlines())}{fix}"
