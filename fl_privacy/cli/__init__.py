"""`fl-privacy`: run federations, check them before, read their transcripts after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fl_privacy.errors import FederationError

from . import (  # noqa: F401 (each adds its commands to the program)
    attack,
    deploy,
    pki,
    plugins,
    run,
    site,
    status,
    transcript,
)
from .common import INTERRUPTED, app


def main() -> None:
    """Exit codes: 0 done, 1 a transcript does not verify or an audit has failures, 2 to be mended, 130 interrupted."""
    sys.exit(_guarded(lambda: app(standalone_mode=False)))


def _guarded(command: Callable[[], Any]) -> int:
    import click

    try:
        code = command()
    except (FederationError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print("error: " + " ".join(text.split()), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 2
    if code == INTERRUPTED:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
    return code if isinstance(code, int) else 0
