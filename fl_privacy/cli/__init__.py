"""`fl-privacy`: run federations, check them beforehand, read their transcripts afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fl_privacy.errors import FederationError
from fl_privacy.visible import visible

from . import attack, deploy, export, pki, plugins, run, runs, site, status, task, transcript  # noqa: F401 (add commands)
from .common import INTERRUPTED, app


def main() -> None:
    """Exit codes: 0 success, 1 a failed verification or audit, 2 an error you can fix, 130 interrupted."""
    sys.exit(_guarded(lambda: app(standalone_mode=False)))


def _guarded(command: Callable[[], Any]) -> int:
    import click

    try:
        code = command()
    except (FederationError, click.ClickException) as error:
        lines = [error.format_message()] if isinstance(error, click.ClickException) else error.lines
        print("error: " + "\n  ".join(visible(" ".join(line.split())) for line in lines), file=sys.stderr)
        return 2
    except click.Abort:  # a question that was not answered
        print("interrupted; nothing was changed", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 2
    if code == INTERRUPTED:
        print("interrupted; all processes have been stopped", file=sys.stderr)
    return code if isinstance(code, int) else 0
