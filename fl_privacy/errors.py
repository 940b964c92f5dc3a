"""One exception hierarchy: every message names the field, the value and the fix."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTHING: Mapping[str, Any] = {}


class FederationError(Exception):
    """An error the user can fix. The CLI prints it as one line and exits with 2."""

    @property
    def lines(self) -> list[str]:
        """As a terminal shows it."""
        return [str(self)]


class ConfigError(FederationError):
    """The federation's YAML is invalid or combines options that are not supported together."""


class DataError(FederationError):
    """A data set is missing, incomplete or not the expected file."""


class DataProblems(DataError):
    """Several problems of a site's files, each with its fix: one line in a log, a line each on a terminal."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        super().__init__(f"{title}: {'; '.join(problems)}")
        self.title, self.problems = title, list(problems)

    @property
    def lines(self) -> list[str]:
        return [self.title, *self.problems] if len(self.problems) > 1 else [str(self)]


class ProtocolError(FederationError):
    """A message broke a rule of the round; `code` is the name of the gRPC status sent in reply."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def require(holds: bool, message: str, code: str = "INVALID_ARGUMENT") -> None:
    """Refuse a message that breaks a rule of the round."""
    if not holds:
        raise ProtocolError(code, message)


def reason_of(error: Exception) -> str:
    """One line for the log of whoever is concerned; errors that are not ours are named by their type."""
    lines = str(error).strip().splitlines() or [""]
    return str(error) if isinstance(error, FederationError) else f"{type(error).__name__}: {lines[0][:200]}"


class TranscriptError(FederationError):
    """A run folder is incomplete, or was changed after it was signed."""


class LaunchError(FederationError):
    """A federation could not be started or did not finish."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while a run was under way; its processes have been stopped."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(str(run_dir))
        self.run_dir = run_dir


class RoundFailed(Exception):
    """An attempt at a round gave nothing; another may be tried: of at least this number, if one is given."""

    def __init__(self, reason: str, number: int = 0, seen: Mapping[str, Any] = NOTHING, events: Sequence[Any] = ()):
        """`seen` and `events` are for the server's record: what shows who made it fail."""
        super().__init__(reason)
        self.number, self.seen, self.events = number, seen, events
