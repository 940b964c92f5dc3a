"""Certificates that are replaced while a process runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fl_privacy.errors import LaunchError
from fl_privacy.files import stamp

T = TypeVar("T")


class Watched(Generic[T]):
    """Something made of files, made again when one of them has changed; while they do not fit, the old one stays."""

    def __init__(self, files: Sequence[Path], make: Callable[[], T], again: Callable[[], T] | None = None) -> None:
        """`again` makes it of changed files, if they are held to more than the first ones."""
        self._files, self._again = files, again or make
        self._stamp = stamp(files)
        try:
            self.made = make()
        except (OSError, ValueError) as error:
            names = ", ".join(str(path) for path in files)
            raise LaunchError(f"certificates {names}: {error}; they must be readable and belong together") from None

    def changed(self) -> bool:
        """Look at the files; whether something new was made of them."""
        found = stamp(self._files)
        if found == self._stamp:
            return False
        try:
            made = self._again()
        except (OSError, ValueError, LaunchError):
            return False
        before, self._stamp, self.made = self.made, found, made
        return made != before

    def get(self) -> T:
        self.changed()
        return self.made
