"""The context of a result: processor, versions, date. Nothing that identifies the machine."""

from __future__ import annotations

import datetime as dt
import os
import platform
from importlib.metadata import version

from fl_privacy.report.machine import cpu


def facts() -> dict[str, str]:
    return {
        "cpu": cpu(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "flwr", "grpcio", "numpy")},
        "date": dt.date.today().isoformat(),
    }
