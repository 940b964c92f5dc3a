"""The problems of a site's files: all of them in one error, each with its place and its fix."""

from __future__ import annotations

from typing import Protocol

from fl_privacy.errors import DataError

LISTED = 20  # the rest is counted


class Add(Protocol):
    """Notes a problem, with the fix in brackets, and where it is: `line 3`, `column 'age'`."""

    def __call__(self, problem: str, *place: str) -> None: ...


class Findings:
    """Problems of the files in `where`.

    No problem quotes a cell: errors end up in logs, and data must not.
    """

    def __init__(self, where: object) -> None:
        self._where, self._listed, self.count = where, list[str](), 0

    def of(self, file: str) -> Add:
        """For the problems of one file."""
        name = file if file.isprintable() else repr(file)

        def add(problem: str, *place: str) -> None:
            self.count += 1
            if self.count <= LISTED:
                self._listed.append(f"{', '.join((name, *place))}: {problem}")

        return add

    def check(self) -> None:
        """Raise if there are problems."""
        if self.count:
            more = f"; and {self.count - LISTED} more" if self.count > LISTED else ""
            counted = "1 problem" if self.count == 1 else f"{self.count} problems"
            raise DataError(f"data: {counted} in {self._where}: {'; '.join(self._listed)}{more}")
