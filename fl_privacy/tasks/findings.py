"""The problems of a site's files: all of them in one error, each with its place and its fix."""

from __future__ import annotations

import re
from typing import Protocol

from fl_privacy.errors import DataProblems

LISTED = 20  # different problems, and lines of the same problem; the rest is counted
NUMBERED = re.compile(r"(.*?, (?:line|record)) (\d+)(.*)", re.DOTALL)


class Add(Protocol):
    """Notes a problem, with the fix in brackets, and where it is: `line 3`, `column 'age'`."""

    def __call__(self, problem: str, *place: str) -> None: ...


class Findings:
    """Problems of the files in `where`.

    No problem quotes a cell: errors end up in logs, and data must not.
    """

    def __init__(self, where: object) -> None:
        self._where, self._listed, self.count = where, dict[tuple[str, str], _Lines](), 0

    def of(self, file: str) -> Add:
        """For the problems of one file."""
        name = file if file.isprintable() else repr(file)

        def add(problem: str, *place: str) -> None:
            self.count += 1
            text = f"{', '.join((name, *place))}: {problem}"
            found = NUMBERED.fullmatch(text)
            before, number, after = found.groups() if found else (text, "", "")
            if (before, after) in self._listed or len(self._listed) < LISTED:
                self._listed.setdefault((before, after), _Lines()).add(number)

        return add

    def check(self) -> None:
        """Raise if there are problems."""
        if self.count:
            rest = self.count - sum(lines.count for lines in self._listed.values())
            more = [f"and {rest} more"] if rest else []
            counted = "1 problem" if self.count == 1 else f"{self.count} problems"
            listed = [f"{before}{lines}{after}" for (before, after), lines in self._listed.items()]
            raise DataProblems(f"data: {counted} in {self._where}", listed + more)


class _Lines:
    """Where the same problem is: ` 3`, or `s 3, 7, 8`."""

    def __init__(self) -> None:
        self._first, self.count = list[str](), 0

    def add(self, number: str) -> None:
        self.count += 1
        if len(self._first) < LISTED:
            self._first.append(number)

    def __str__(self) -> str:
        numbers = list(dict.fromkeys(filter(None, self._first)))  # two problems of one line may read the same
        more = f" and {self.count - LISTED} more" if self.count > LISTED else ""
        return f"{'s' * (len(numbers) > 1)} {', '.join(numbers)}{more}" if numbers else ""
