"""Build .venv from the lock file: torch first (CPU build unless TORCH=cuda), then the pins, then the project.

Standard library only, and no syntax newer than Python 3.8: it may be started by an interpreter that is too old
to run the project, only to find a better one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)  # the Pythons that every package of the lock has wheels for
CANDIDATES = ("python3.13", "python3.12", "python3.11", "python3")
FLAVOURS = ("cpu", "cuda")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda|triton)(-|$)")
STAMP = "installed.json"
HINTS = (
    (r"No space left", "free some disk space (about 3 GB are needed) and repeat the command"),
    (r"libgomp", "install the OpenMP runtime (Debian: apt-get install libgomp1; macOS: brew install libomp)"),
    (r"No matching distribution", "no wheel for this Python or platform: try PYTHON=python3.11"),
    (
        r"NewConnection|ConnectTimeout|ReadTimeout|Temporary failure|Max retries|Proxy",
        "check the network or pip's proxy settings and repeat the command",
    ),
    (r"", "repeat the command; `make clean` first starts from nothing"),
)


class InstallError(Exception):
    """A failure told in one line, with the fix."""


class Python(NamedTuple):
    """An interpreter that runs: where it is, its version, and whether it can make virtual environments."""

    executable: str
    version: tuple[int, int, int]
    has_venv: bool


class Source(NamedTuple):
    """What to ask pip for, with which options, to get the wanted torch."""

    requirement: str
    options: tuple[str, ...] = ()


def normalise(name: str) -> str:
    """A distribution's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """The pins of a lock file: normalised name to version."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pins = (line.split("==") for line in lines if line)
    return {normalise(name): version for name, version in pins}


# Which Python


def probe_python(command: str) -> Python | None:
    """The interpreter behind a command, or None if it does not run (a version manager's shim may exist and fail)."""
    code = (
        "import importlib.util as u, json, sys\n"
        "venv = all(u.find_spec(m) for m in ('venv', 'ensurepip'))\n"
        "print(json.dumps([getattr(sys, '_base_executable', sys.executable), list(sys.version_info[:3]), venv]))"
    )
    try:
        done = subprocess.run([command, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        executable, version, has_venv = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return Python(executable, tuple(version), has_venv)


def choose_python(requested: str, probe: Callable[[str], Python | None] = probe_python) -> Python:
    """The requested interpreter, else the newest that the lock supports and that can make a virtual environment."""
    found = [python for python in map(probe, [requested] if requested else CANDIDATES) if python]
    fitting = [python for python in found if OLDEST <= python.version[:2] <= NEWEST]
    for python in fitting:
        if python.has_venv:
            return python
    if fitting:
        major, minor, _ = fitting[0].version
        package = f"python{major}.{minor}-venv"
        raise InstallError(f"{fitting[0].executable} has no venv module (Debian: apt-get install {package})")
    if requested:
        reason = f"is {version_text(found[0])}" if found else "does not run"
        raise InstallError(f"PYTHON={requested} {reason}: Python {supported()} is needed")
    debian = "apt-get install python3 python3-venv"
    raise InstallError(f"no Python {supported()} found: install one (Debian: {debian}) or name it with PYTHON=...")


def supported() -> str:
    return "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def version_text(python: Python) -> str:
    return ".".join(map(str, python.version))


# Which torch


def cuda_packages(names: Iterable[str]) -> list[str]:
    """Those of the named distributions that belong to the CUDA stack."""
    return sorted(name for name in map(normalise, names) if CUDA_PACKAGE.match(name))


def is_cpu_build(report: dict[str, Any] | None) -> bool:
    """Whether a pip report's torch is a CPU build: it says so in its version, or it needs nothing of CUDA."""
    for item in (report or {}).get("install", []):
        metadata = item["metadata"]
        if normalise(metadata["name"]) == "torch":
            needs = (re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in metadata.get("requires_dist", []))
            return metadata["version"].endswith("+cpu") or not cuda_packages(needs)
    return False


def choose_torch(version: str, flavour: str, platform: str, report: Callable[[str], dict[str, Any] | None]) -> Source:
    """Where torch comes from: pip's configured sources if they offer the flavour, else PyTorch's own CPU index.

    On Linux only the version marked +cpu is asked for: looking at the plain one could download the CUDA wheel.
    """
    plain, marked = f"torch=={version}", f"torch=={version}+cpu"
    if flavour == "cuda":
        return Source(plain)
    for requirement in [marked] if platform.startswith("linux") else [marked, plain]:
        if is_cpu_build(report(requirement)):
            return Source(requirement, ("--no-deps",))
    return Source(marked, ("--no-deps", "--index-url", TORCH_CPU_INDEX))


# The environment


class Environment:
    """A virtual environment, its log and the stamp that says what it was completed with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"

    def stamp(self) -> dict[str, str]:
        """What the last complete install was made from; empty if there was none."""
        try:
            stamp: dict[str, str] = json.loads((self.folder / STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return stamp if self.python.exists() else {}

    def write_stamp(self, stamp: dict[str, str]) -> None:
        draft = self.folder / (STAMP + ".new")
        draft.write_text(json.dumps(stamp, indent=2))
        draft.replace(self.folder / STAMP)

    def remove_stamp(self) -> None:
        if (self.folder / STAMP).exists():
            (self.folder / STAMP).unlink()

    def create(self, python: Python) -> None:
        """An empty environment: what an interrupted install left cannot be trusted, pip would take it for complete."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        self.run(python.executable, "-m", "venv", str(self.folder))

    def installed(self) -> dict[str, str]:
        """Installed distributions: normalised name to version."""
        places = [str(place) for place in self.folder.glob("lib/python*/site-packages")]
        found = importlib.metadata.distributions(path=places)
        return {normalise(dist.metadata["Name"]): dist.version for dist in found if dist.metadata["Name"]}

    def run(self, *command: str) -> None:
        """Run a command with its output in the log."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            status = wait(command, log)
        if status:
            lines = self.log.read_text(errors="replace").splitlines()
            print("\n".join(["  " + line for line in lines[-12:]]), file=sys.stderr)
            raise InstallError(f"failed, see {self.log}: {hint(lines[-60:])}")

    def pip_command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]

    def pip(self, *arguments: str) -> None:
        self.run(*self.pip_command(*arguments))

    def pip_report(self, requirement: str) -> dict[str, Any] | None:
        """What pip would install for a requirement from its configured sources, or None if they do not have it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            command = self.pip_command("install", "--dry-run", "--no-deps", "--report", str(path), requirement)
            if subprocess.run(command, env=clean_environment(), capture_output=True).returncode:
                return None
            report: dict[str, Any] = json.loads(path.read_text())
            return report

    def freeze(self) -> str:
        """`pip freeze` with pip and setuptools, which it leaves out by default."""
        done = subprocess.run(self.pip_command("freeze", "--all"), capture_output=True, text=True, check=True)
        return done.stdout


def wait(command: Iterable[str], log: TextIO) -> int:
    """Run a command to completion, and stop it if this process is stopped."""
    child = subprocess.Popen(
        list(command), env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False
    )
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise


def clean_environment() -> dict[str, str]:
    """The environment without what would let pip see packages outside the virtual environment."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER")}


def hint(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return next(advice for pattern, advice in HINTS if re.search(pattern, text))


def lock_folder(folder: Path) -> int:
    """Wait until no other install works here. Its pip children hold the lock too, should it have been killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another install in this folder to end", flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


# The install


def wanted_stamp(root: Path, flavour: str) -> dict[str, str]:
    """What an up-to-date environment was made from. The folder counts: a moved environment does not run."""
    files = {name: (root / name).read_bytes() for name in ("requirements.lock", "pyproject.toml", "scripts/install.py")}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {"torch": flavour, "folder": str(root), **digests}


def is_current(stamp: dict[str, str], wanted: dict[str, str]) -> bool:
    return {key: value for key, value in stamp.items() if key != "python"} == wanted


def is_reusable(stamp: dict[str, str], wanted: dict[str, str], python: Python) -> bool:
    """Whether an environment can be updated in place instead of being recreated."""
    same = all(stamp.get(key) == wanted[key] for key in ("torch", "folder"))
    return same and stamp.get("python") == version_text(python)


def install_torch(env: Environment, pins: dict[str, str], flavour: str, lock: Path) -> None:
    if env.installed().get("torch", "").split("+")[0] == pins["torch"]:
        return
    source = choose_torch(pins["torch"], flavour, sys.platform, env.pip_report)
    env.pip("install", "--no-compile", "--constraint", str(lock), *source.options, source.requirement)


def install_pinned(env: Environment, lock: Path) -> None:
    """The lock is complete, so nothing is resolved; byte code is made afterwards, on all cores."""
    env.pip("install", "--no-compile", "--no-deps", "-r", str(lock))
    packages = "sysconfig.get_path('purelib')"
    env.run(
        str(env.python),
        "-c",
        f"import compileall, sysconfig; compileall.compile_dir({packages}, quiet=2, workers=0)",
    )


def verify(env: Environment, flavour: str) -> None:
    """Nothing missing, nothing of CUDA in a CPU environment, and the one library that wheels do not carry is there."""
    unwanted = cuda_packages(env.installed())
    if flavour == "cpu" and unwanted:
        raise InstallError(f"CUDA packages in a CPU install ({', '.join(unwanted[:4])}): run `make clean install`")
    env.pip("check")
    env.run(str(env.python), "-c", "import lightgbm")


def steps(env: Environment, python: Python, flavour: str, root: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    lock = root / "requirements.lock"
    pins = read_lock(lock.read_text())
    if not env.stamp():
        yield f"creating .venv with Python {version_text(python)}", lambda: env.create(python)
    env.remove_stamp()
    size = "about a minute" if flavour == "cpu" else "several GB, some minutes"
    yield f"torch {pins['torch']}, {flavour} build ({size})", lambda: install_torch(env, pins, flavour, lock)
    yield f"{len(pins) - 1} pinned packages (about two minutes)", lambda: install_pinned(env, lock)
    editable = ("install", "--no-deps", "--no-build-isolation", "--editable", str(root))
    yield "fl-privacy itself", lambda: env.pip(*editable)
    yield "checking", lambda: verify(env, flavour)


def install(root: Path, requested_python: str, requested_flavour: str) -> None:
    """Bring root/.venv up to date; without a request, keep the Python and the torch flavour it has."""
    if requested_flavour not in ("", *FLAVOURS):
        raise InstallError(f"TORCH={requested_flavour} is unknown: use TORCH=cpu or TORCH=cuda")
    env = Environment(root / ".venv")

    def settled() -> bool:
        stamp = env.stamp()
        wanted = wanted_stamp(root, requested_flavour or stamp.get("torch", "cpu"))
        same_python = not requested_python or stamp.get("python") == version_text(choose_python(requested_python))
        return is_current(stamp, wanted) and same_python

    if settled():
        return
    lock_folder(root)
    if settled():
        return
    stamp = env.stamp()
    flavour = requested_flavour or stamp.get("torch", "cpu")
    wanted = wanted_stamp(root, flavour)
    python = choose_python(requested_python or (str(env.python) if stamp else ""))
    if not is_reusable(stamp, wanted, python):
        env.remove_stamp()
    begin = time.monotonic()
    for name, step in steps(env, python, flavour, root):
        start = time.monotonic()
        print(f"install: {name} ...", end=" ", flush=True)
        try:
            step()
        except BaseException:
            print("stopped", flush=True)
            raise
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    env.write_stamp({**wanted, "python": version_text(python)})
    print(f"install: ready after {time.monotonic() - begin:.0f} s, log in .venv/install.log")


def stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="Create or update .venv from requirements.lock.")
    parser.add_argument("--python", default="", help="interpreter to use (default: the newest supported one)")
    parser.add_argument("--torch", default="", help="torch build, cpu or cuda (default: cpu)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    try:
        install(ROOT, arguments.python, arguments.torch)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("install: interrupted; the next call starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
