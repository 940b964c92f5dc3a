"""Fill wheelhouse/ with the wheels that the image and the offline bundle are made of, at the versions of the lock.

The needs of pyproject.toml are followed from wheel to wheel, so nothing of the development tools comes along. Each
wheel is recorded with its SHA-256 in wheelhouse/requirements.txt, which `pip install --require-hashes` accepts;
what is recorded and unchanged is not loaded again, so a broken download goes on where it stopped.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import install
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ARCHITECTURES = ("x86_64", "aarch64")
PYTHON = "3.11"  # of the image
NEWEST_GLIBC = 36  # of Debian bookworm: 2.36
MANIFEST = "requirements.txt"
HEADER = "# The wheels of this folder, TORCH={flavour} ARCH={arch}; written by `make wheelhouse`.\n"


class Wheel(NamedTuple):
    """A wheel in the wheelhouse: what it is, and what it must hash to."""

    name: str
    version: str
    path: Path
    sha256: str

    def line(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path) -> Wheel:
    name, version, _, _ = parse_wheel_filename(path.name)
    return Wheel(str(name), str(version), path, digest(path))


def metadata(path: Path) -> email.message.Message:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def environment(arch: str) -> dict[str, str]:
    """The image as environment markers see it."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{PYTHON}.0",
        "os_name": "posix",
        "platform_machine": arch,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{PYTHON}.0",
        "python_version": PYTHON,
        "sys_platform": "linux",
    }


def needs(found: Iterable[str], extras: Iterable[str], arch: str) -> Iterator[Requirement]:
    """Those of a distribution's requirements that hold in the image, with the given extras."""
    place = environment(arch)
    for text in found:
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({**place, "extra": extra}) for extra in ("", *extras)):
            yield need


def platforms(arch: str) -> list[str]:
    """The platform tags that run in the image; those for older systems first, as the bundle may go to one."""
    legacy = [] if arch == "aarch64" else ["manylinux1", "manylinux2010"]
    oldest = 17 if arch == "aarch64" else 5
    names = [*legacy, "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(oldest, NEWEST_GLIBC + 1))]
    return [f"{name}_{arch}" for name in [*names, "linux"]]


def fits(wheel: Wheel, need: Requirement, pin: str | None) -> bool:
    """Whether a wheel is of the pinned version, or of one that is asked for where there is no pin (CUDA's)."""
    return wheel.version.split("+")[0] == pin if pin else wheel.version in need.specifier


class Wheelhouse:
    """The folder, with what its manifest records and what this call has found complete."""

    def __init__(self, folder: Path, arch: str, flavour: str) -> None:
        self.folder, self.arch, self.flavour = folder, arch, flavour
        self.staging = folder / ".part"
        self.wheels: dict[str, Wheel] = {}
        self.loaded = 0

    def recorded(self) -> dict[str, Wheel]:
        """Wheels that are in the manifest, there, and unchanged, if it is for this architecture and this torch."""
        manifest = self.folder / MANIFEST
        lines = manifest.read_text().splitlines(keepends=True) if manifest.exists() else []
        if lines[:1] != [HEADER.format(flavour=self.flavour, arch=self.arch)]:
            return {}
        expected = set(lines[1:])
        wheels = (describe(path) for path in self.folder.glob("*.whl"))
        return {wheel.name: wheel for wheel in wheels if wheel.line() in expected}

    def load(self, requirements: list[str], *options: str) -> dict[str, Wheel]:
        """Download into the staging folder, then move: a wheel under its own name is a complete one."""
        shutil.rmtree(self.staging, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--quiet"]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        command += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
        command += [f"--platform={platform}" for platform in platforms(self.arch)]
        command += ["--dest", str(self.staging), *options, *requirements]
        done = subprocess.run(command, env=install.clean_environment(), capture_output=True, text=True)
        if done.returncode:
            print(done.stderr.rstrip(), file=sys.stderr)
            raise install.InstallError(f"download failed: {install.hint(done.stderr.splitlines())}")
        moved = [path.replace(self.folder / path.name) for path in self.staging.glob("*.whl")]
        self.loaded += len(moved)
        return {wheel.name: wheel for wheel in map(describe, moved)}

    def load_torch(self, version: str) -> dict[str, Wheel]:
        """As scripts/install.py: pip's own sources if they have the CPU build, else PyTorch's index."""
        if self.flavour == "cuda":
            return self.load([f"torch=={version}"])
        try:
            return self.load([f"torch=={version}+cpu"])
        except install.InstallError:
            return self.load([f"torch=={version}+cpu"], "--index-url", install.TORCH_CPU_INDEX)

    def get(self, wanted: dict[str, Requirement], pins: dict[str, str], known: dict[str, Wheel]) -> None:
        """Have the wanted distributions: those known at the wanted version stay, the others are loaded."""
        missing = []
        for name, need in wanted.items():
            wheel = known.get(name)
            if wheel and fits(wheel, need, pins.get(name)):
                self.wheels[name] = wheel
            elif name == "torch":
                self.wheels |= self.load_torch(pins[name])
            else:
                missing.append(f"{name}=={pins[name]}" if name in pins else f"{name}{need.specifier}")
        if missing:
            self.wheels |= self.load(missing)
        self.record(known)

    def record(self, known: dict[str, Wheel]) -> None:
        draft = self.folder / ".manifest.new"
        wheels = {**known, **self.wheels}
        lines = (wheels[name].line() for name in sorted(wheels) if wheels[name].path.exists())
        draft.write_text(HEADER.format(flavour=self.flavour, arch=self.arch) + "".join(lines))
        draft.replace(self.folder / MANIFEST)

    def fill(self, roots: Iterable[str], pins: dict[str, str]) -> None:
        """Follow the roots from wheel to wheel, a level of needs at a time, then drop what nothing needs."""
        known = self.recorded()
        asked: set[tuple[str, str]] = set()
        level = list(needs(roots, (), self.arch))
        while level:
            named = {install.normalise(need.name): need for need in level}
            self.get({name: need for name, need in named.items() if name not in self.wheels}, pins, known)
            following = []
            for need in level:
                name = install.normalise(need.name)
                for extra in {"", *need.extras}:
                    if (name, extra) not in asked:
                        asked.add((name, extra))
                        listed = metadata(self.wheels[name].path).get_all("Requires-Dist") or []
                        following += needs(listed, [extra], self.arch)
            level = following
        kept = {wheel.path for wheel in self.wheels.values()}
        for path in set(self.folder.glob("*.whl")) - kept:
            path.unlink()
        shutil.rmtree(self.staging, ignore_errors=True)
        self.record({})


def project_needs(pyproject: str) -> list[str]:
    """What the image needs: the project's runtime requirements, and what builds its wheel."""
    tables = tomllib.loads(pyproject)
    return [*tables["project"]["dependencies"], *tables["build-system"]["requires"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", help="torch build, cpu or cuda (default: cpu)")
    parser.add_argument("--arch", default="", help="machine of the image, x86_64 or aarch64 (default: x86_64)")
    arguments = parser.parse_args()
    flavour, arch = arguments.torch or "cpu", arguments.arch or "x86_64"
    begin = time.monotonic()
    try:
        if flavour not in install.FLAVOURS:
            raise install.InstallError(f"TORCH={flavour} is unknown: use TORCH=cpu or TORCH=cuda")
        if arch not in ARCHITECTURES:
            raise install.InstallError(f"ARCH={arch} is unknown: use ARCH=x86_64 or ARCH=aarch64")
        folder = install.ROOT / "wheelhouse"
        folder.mkdir(exist_ok=True)
        install.lock_folder(folder)
        print(f"wheelhouse: Python {PYTHON}, {arch}, torch {flavour}: looking for what is missing", flush=True)
        house = Wheelhouse(folder, arch, flavour)
        pins = install.read_lock((install.ROOT / "requirements.lock").read_text())
        house.fill(project_needs((install.ROOT / "pyproject.toml").read_text()), pins)
    except install.InstallError as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("wheelhouse: interrupted; the next call goes on", file=sys.stderr)
        return 130
    size = sum(wheel.path.stat().st_size for wheel in house.wheels.values())
    spent = time.monotonic() - begin
    print(f"wheelhouse: {len(house.wheels)} wheels, {size / 1e6:.0f} MB, {house.loaded} loaded now, {spent:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
