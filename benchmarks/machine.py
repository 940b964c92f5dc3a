"""What a result must be read with: the processor, the versions, the day. Nothing that names the machine."""

from __future__ import annotations

import datetime as dt
import os
import platform
from importlib.metadata import version
from pathlib import Path


def facts() -> dict[str, str]:
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "flwr", "grpcio", "numpy")},
        "date": dt.date.today().isoformat(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
