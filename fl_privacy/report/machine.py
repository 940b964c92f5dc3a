"""The context of a result: processor, memory and versions, but nothing that identifies the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil


def facts() -> dict[str, str | int | float]:
    return {
        "cpu": cpu(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    packages = ("fl-privacy", "flwr", "torch", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
