"""Write requirements.lock: resolve pyproject.toml with all extras in a clean environment and freeze the result."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import install

HEADER = """\
# Exact versions of everything that runs, tests or builds the project, for Python {supported}.
# Written by `make lock`, read by `make install`, which takes torch's CPU build unless TORCH=cuda.
"""
LEFT_OUT = {"pip", "fl-privacy"}


def direct_requirements(pyproject: str) -> list[str]:
    """What pyproject.toml asks for itself: runtime, extras and the build."""
    tables = tomllib.loads(pyproject)
    project = tables["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    return [*project["dependencies"], *extras, *tables["build-system"]["requires"]]


def pins(frozen: str) -> list[str]:
    """The lines of a lock file from `pip freeze --all`; torch without its flavour, so that one pin fits every build."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)(?:\+\w+)?$", frozen, flags=re.MULTILINE)
    kept = [(name, version) for name, version in found if install.normalise(name) not in LEFT_OUT]
    return [f"{name}=={version}" for name, version in sorted(kept, key=lambda pin: install.normalise(pin[0]))]


def resolve(torch: str, python: install.Python) -> str:
    """`pip freeze` of a clean environment with torch's CPU build and all requirements."""
    with tempfile.TemporaryDirectory() as folder:
        env = install.Environment(Path(folder, "venv"))
        constraint = Path(folder, "constraint.txt")
        constraint.write_text(f"torch=={torch}\n")
        env.create(python)
        install.install_torch(env, {"torch": torch}, "cpu", constraint)
        requirements = direct_requirements((install.ROOT / "pyproject.toml").read_text())
        env.pip("install", "--upgrade-strategy", "eager", "--constraint", str(constraint), *requirements)
        env.pip("check")
        return env.freeze()


def main() -> int:
    path = install.ROOT / "requirements.lock"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="", help="interpreter to resolve with")
    parser.add_argument("--torch", default="", help="version of torch (default: the one in the lock)")
    arguments = parser.parse_args()
    try:
        torch = arguments.torch or install.read_lock(path.read_text())["torch"]
        print("lock: resolving in a clean environment (some minutes)", flush=True)
        lines = pins(resolve(torch, install.choose_python(arguments.python)))
    except install.InstallError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    path.write_text(HEADER.format(supported=install.supported()) + "\n".join(lines) + "\n")
    print(f"lock: {len(lines)} packages in {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
