"""Make dist/fl-privacy-VERSION-bundle: what a site without network and registry needs to install fl-privacy.

Wheels with a requirements file of their hashes, the project's wheel, the image archive if a Docker answers, a bill of
materials, SHA256SUMS, and install.sh, which checks everything and installs it. Run `make wheelhouse` first.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import install
import sbom

from wheelhouse import HEADER, MANIFEST, PYTHON, Wheel, describe, digest

TEMPLATES = install.ROOT / "scripts" / "bundle-files"
EPOCH = "315532800"  # the oldest time a zip file can hold: the same source gives the same wheel


def build_wheel(root: Path, folder: Path) -> Wheel:
    """The project's wheel, built from a copy of its sources so that nothing old in build/ gets in."""
    tables = tomllib.loads((root / "pyproject.toml").read_text())
    packages = [name.rstrip("*") for name in tables["tool"]["setuptools"]["packages"]["find"]["include"]]
    with tempfile.TemporaryDirectory() as source:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / name, source)
        for name in packages:
            shutil.copytree(root / name, Path(source, name), ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "wheel", "--quiet"]
        command += ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), source]
        environment = {**install.clean_environment(), "SOURCE_DATE_EPOCH": EPOCH}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.rstrip(), file=sys.stderr)
        raise install.InstallError("the project's wheel does not build: see the messages above")
    return describe(next(folder.glob("fl_privacy-*.whl")))


def read_wheelhouse(folder: Path) -> tuple[str, list[Wheel]]:
    """The manifest's header and the wheels it records, each checked."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise install.InstallError("wheelhouse/ is empty: run `make wheelhouse` first")
    header, *lines = manifest.read_text().splitlines(keepends=True)
    wheels = {wheel.line(): wheel for wheel in map(describe, sorted(folder.glob("*.whl")))}
    missing = [line.split()[0] for line in lines if line not in wheels]
    if missing:
        raise install.InstallError(f"wheelhouse/ lacks {missing[0]} or has another file: run `make wheelhouse`")
    return header, [wheels[line] for line in lines]


def check_lock(wheels: Iterable[Wheel], pins: dict[str, str]) -> None:
    stale = [wheel for wheel in wheels if pins.get(wheel.name, wheel.version) != wheel.version.split("+")[0]]
    if stale:
        raise install.InstallError(f"wheelhouse/ has {stale[0].name} {stale[0].version}: run `make wheelhouse`")


def save_image(image: str, path: Path) -> None:
    """`docker save`, compressed; without a time stamp, so that the same image gives the same bytes."""
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=3, fileobj=raw, mtime=0) as packed:
            shutil.copyfileobj(saving.stdout, packed, 1 << 20)
    if saving.returncode:
        raise install.InstallError(f"docker save {image} failed: run `make image` first")


def debian_packages(image: str) -> Iterator[tuple[str, str]]:
    query = ["--entrypoint", "dpkg-query", image, "-W", "-f", "${Package} ${Version}\n"]
    done = subprocess.run(["docker", "run", "--rm", "--network", "none", *query], capture_output=True, text=True)
    if done.returncode:
        raise install.InstallError(f"the packages of {image} cannot be listed: {done.stderr.strip()}")
    for line in done.stdout.splitlines():
        name, version = line.split()
        yield name, version


def write_sums(folder: Path) -> str:
    """SHA256SUMS of everything in the folder; its own digest stands for all."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.relative_to(folder)}\n" for path in paths))
    return digest(sums)


def make(root: Path, image: str) -> tuple[Path, str]:
    """The bundle's folder and the digest of its SHA256SUMS. It gets its name when it is complete."""
    header, wheels = read_wheelhouse(root / "wheelhouse")
    check_lock(wheels, install.read_lock((root / "requirements.lock").read_text()))
    draft = root / "dist" / ".bundle.new"
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "wheels").mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel.path, draft / "wheels")
    project = build_wheel(root, draft / "wheels")
    (draft / "requirements.txt").write_text(header + "".join(wheel.line() for wheel in [*wheels, project]))
    if image:
        save_image(image, draft / "image.tar.gz")
    (draft / "sbom.cdx.json").write_text(sbom.bill(project, wheels, debian_packages(image) if image else ()))
    values = {"VERSION": project.version, "PYTHON": PYTHON, "IMAGE": image, "PLATFORM": header_arch(header)}
    for template in TEMPLATES.iterdir():
        text = template.read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        (draft / template.name).write_text(text)
    (draft / "install.sh").chmod(0o755)
    total = write_sums(draft)
    folder = root / "dist" / f"fl-privacy-{project.version}-bundle"
    shutil.rmtree(folder, ignore_errors=True)
    return draft.replace(folder), total


def header_arch(header: str) -> str:
    for arch in ("x86_64", "aarch64"):
        if any(header == HEADER.format(flavour=flavour, arch=arch) for flavour in install.FLAVOURS):
            return arch
    raise install.InstallError("wheelhouse/requirements.txt is of another version: run `make wheelhouse`")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="", help="image to put in (default: none)")
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        folder, total = make(install.ROOT, arguments.image)
    except install.InstallError as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"bundle: {os.path.relpath(folder)}, {size / 1e6:.0f} MB, {time.monotonic() - begin:.0f} s")
    print(f"bundle: send the SHA-256 of SHA256SUMS to the sites over a separate channel: {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
