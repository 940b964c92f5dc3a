"""What processes inherit of the environment of whoever starts them: what is on a list, as the rest may be secret."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

LOCALE, LOCALES = ("LANG", "LANGUAGE", "TZ"), ("LC_",)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
KEPT = (*LOCALE, *FOLDERS, "USER", "LOGNAME", "FLWR_LOG_LEVEL", *PROXIES, *(name.upper() for name in PROXIES))
FAMILIES = (
    *(*LOCALES, "FL_PRIVACY_", "PYTHON", "GRPC_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "TORCH", "PYTORCH_"),
)
KEEP = "FL_PRIVACY_KEEP"  # further names, with commas between them: for a task of one's own, say
SET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; 1 by default, paid at every start
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # no module comes from the folder that a command is called in, such as a kit
    "OMP_NUM_THREADS": "1",
}


def own(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process of ours: what it needs of the operator's environment, but none of the secrets in it."""
    names = (*KEPT, *(name.strip() for name in environ.get(KEEP, "").split(",")))
    return {**_of(environ, names, FAMILIES), **SET, "PATH": _path(environ.get("PATH", os.defpath))}


def confined(node: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that runs code that comes with a run: the locale, and folders of its own."""
    folders = {"HOME": str(node), "TMPDIR": str(node / "tmp"), "FLWR_HOME": str(node / "flwr")}
    return {**_of(environ, LOCALE, LOCALES), **SET, **folders, "PATH": _path(os.defpath)}


def _of(environ: Mapping[str, str], names: tuple[str, ...], families: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names or name.startswith(families)}


def _path(rest: str) -> str:
    """Flower's programs start each other by name: those of this environment come first."""
    return os.pathsep.join((str(Path(sys.executable).parent), rest))
