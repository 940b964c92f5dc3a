"""One exception hierarchy: every message names the field, the value and the fix."""

from pathlib import Path


class FederationError(Exception):
    """An error the user can fix. The CLI prints it as one line and exits with 2."""


class ConfigError(FederationError):
    """The federation's YAML is invalid or combines options that are not supported together."""


class DataError(FederationError):
    """A data set is missing, incomplete or not the expected file."""


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
    """An attempt at a round gave nothing; another may be tried."""
