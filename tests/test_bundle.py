"""The wheelhouse, the bill of materials and the offline bundle, with small wheels built here and no network."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import ROOT, SWITCH

sys.path.insert(0, str(ROOT / "scripts"))
install = importlib.import_module("install")
wheelhouse = importlib.import_module("wheelhouse")
sbom = importlib.import_module("sbom")
bundle = importlib.import_module("bundle")


def make_wheel(folder: Path, name: str, version: str, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    fields = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", fields + "\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The only source that pip has: a folder with a, which requires b, and c for its extra; d is for other systems."""
    folder = tmp_path_factory.mktemp("index")
    needs = ["b>=1", 'c; extra == "more"', 'd; sys_platform == "win32"', 'd; python_version >= "3.12"']
    make_wheel(folder, "a", "1.0", *[f"Requires-Dist: {need}" for need in needs])
    for name, version in (("b", "1.0"), ("b", "2.0"), ("c", "1.0"), ("d", "1.0"), ("torch", "2.0+cpu")):
        make_wheel(folder, name, version)
    config = folder / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {folder}\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", str(config))
        yield folder


PINS = {"a": "1.0", "b": "1.0", "c": "1.0", "torch": "2.0"}


def fill(folder: Path, *roots: str, flavour: str = "cpu") -> Any:
    folder.mkdir(exist_ok=True)
    house = wheelhouse.Wheelhouse(folder, "x86_64", flavour)
    house.fill(roots, PINS)
    return house


@pytest.fixture(scope="module")
def filled(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheelhouse for a, its extra and torch."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    fill(folder, "a[more]", "torch>=2")
    return folder


@pytest.fixture
def house(filled: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(filled, tmp_path / "house")


def names(folder: Path) -> list[str]:
    return sorted("-".join(path.name.split("-")[:2]) for path in folder.glob("*.whl"))


@pytest.mark.usefixtures("index")
class TestWheelhouse:
    def test_requirements_are_followed_at_the_lock_s_versions_and_for_the_image_only(self, tmp_path: Path) -> None:
        fill(tmp_path / "w", "a")
        assert names(tmp_path / "w") == ["a-1.0", "b-1.0"]

    def test_extras_and_the_right_torch_build_are_included(self, filled: Path) -> None:
        assert names(filled) == ["a-1.0", "b-1.0", "c-1.0", "torch-2.0+cpu"]

    def test_existing_wheels_are_checked_and_not_downloaded_again(self, house: Path) -> None:
        assert fill(house, "a").loaded == 0

    def test_damaged_missing_and_unrecorded_wheels_are_downloaded_again(self, house: Path, index: Path) -> None:
        good = {path.name: path.read_bytes() for path in index.glob("*.whl")}
        (house / "a-1.0-py3-none-any.whl").write_bytes(good["b-1.0-py3-none-any.whl"])
        (house / "b-1.0-py3-none-any.whl").unlink()
        assert fill(house, "a[more]").loaded == 2
        assert {path.name: path.read_bytes() for path in house.glob("*.whl")}.items() <= good.items()

    def test_wheels_that_nothing_requires_any_more_are_deleted(self, house: Path) -> None:
        fill(house, "c")
        assert names(house) == ["c-1.0"]
        assert (house / "requirements.txt").read_text().count("==") == 1

    def test_pip_accepts_the_manifest(self, filled: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--require-hashes", "-r"]
        done = subprocess.run([*command, filled / "requirements.txt"], capture_output=True, text=True)
        assert "Would install a-1.0 b-1.0 c-1.0 torch-2.0+cpu" in done.stdout

    def test_a_missing_distribution_is_reported_with_a_hint(self, tmp_path: Path) -> None:
        with pytest.raises(install.InstallError, match="no wheel for this Python"):
            fill(tmp_path / "w", "nowhere")


def test_every_direct_requirement_of_the_image_is_in_the_lock() -> None:
    pins = install.read_lock((ROOT / "requirements.lock").read_text())
    for need in wheelhouse.needs(wheelhouse.project_needs((ROOT / "pyproject.toml").read_text()), (), "x86_64"):
        assert install.normalise(need.name) in pins


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["License-Expression: MIT OR Apache-2.0"], {"expression": "MIT OR Apache-2.0"}),
        (["License: BSD"], {"license": {"name": "BSD"}}),
        (
            ["License: " + "x" * 200, "Classifier: License :: OSI Approved :: MIT License"],
            {"license": {"name": "MIT License"}},
        ),
        ([], {"license": {"name": "NOASSERTION"}}),
    ],
)
def test_a_licence_comes_from_the_distribution_s_metadata(
    tmp_path: Path, lines: list[str], expected: dict[str, Any]
) -> None:
    assert sbom.licence(wheelhouse.metadata(make_wheel(tmp_path, "a", "1.0", *lines))) == expected


def check_bill(text: str) -> list[str]:
    """Check CycloneDX's required fields and what we promise for each component; returns the names."""
    document = json.loads(text)
    assert document["bomFormat"] == "CycloneDX"
    assert document["specVersion"] == "1.5"
    assert document["version"] == 1
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    components = [document["metadata"]["component"], *document["components"]]
    assert len({component["bom-ref"] for component in components}) == len(components)
    for component in components:
        assert component["type"] in ("application", "library")
        assert component["purl"] == component["bom-ref"]
        assert component["version"] in component["purl"]
        if component["purl"].startswith("pkg:pypi/"):
            assert component["licenses"]
            assert [re.fullmatch("[0-9a-f]{64}", entry["content"]) is not None for entry in component["hashes"]] == [
                True
            ]
    return [component["name"] for component in components]


def test_the_bill_lists_wheels_and_system_packages_and_is_repeatable(tmp_path: Path) -> None:
    project, other = (wheelhouse.describe(make_wheel(tmp_path, name, "1.0", "License: MIT")) for name in "pq")
    text = sbom.bill(project, [other], [("libc6", "2.36-9")])
    assert check_bill(text) == ["p", "libc6", "q"]
    assert sbom.bill(project, [other], [("libc6", "2.36-9")]) == text


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the project, a wheelhouse of one small wheel, and the bundle of both."""
    root = tmp_path_factory.mktemp("root")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.lock"):
        shutil.copy(ROOT / name, root / name)
    for name in ("fl_privacy", "server_app", "client_app", "shuffler_app", "aggregator_app", "attacks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    house = wheelhouse.Wheelhouse(root / "wheelhouse", "x86_64", "cpu")
    house.wheels["b"] = wheelhouse.describe(make_wheel(root / "wheelhouse", "b", "1.0"))
    house.record({})
    folder, total = bundle.make(root, "")
    assert total == wheelhouse.digest(folder / "SHA256SUMS")
    assert list((root / "dist").iterdir()) == [folder]
    return root


@pytest.fixture
def small(packed: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may change."""
    root = shutil.copytree(packed, tmp_path / "root")
    return next((root / "dist").iterdir())


def run(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(folder / "install.sh"), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, cwd="/")


class TestBundle:
    def test_its_files_are_listed_and_checked(self, small: Path) -> None:
        listed = {line.split()[1] for line in (small / "SHA256SUMS").read_text().splitlines()}
        there = {str(path.relative_to(small)) for path in small.rglob("*") if path.is_file()}
        assert listed == there - {"SHA256SUMS"}
        assert {"install.sh", "README.md", "requirements.txt", "sbom.cdx.json"} <= listed
        assert not [path for path in small.glob("*.*") if "@VERSION@" in path.read_text()]
        assert check_bill((small / "sbom.cdx.json").read_text()) == ["fl-privacy", "b"]
        assert run(small, "--check").returncode == 0

    @pytest.mark.parametrize("name", ["requirements.txt", "wheels/b-1.0-py3-none-any.whl", "sbom.cdx.json"])
    def test_a_changed_file_is_refused_before_anything_is_installed(
        self, small: Path, tmp_path: Path, name: str
    ) -> None:
        with (small / name).open("a") as file:
            file.write("x")
        done = run(small, tmp_path / "venv")
        assert done.returncode == 1
        assert "damaged or was changed" in done.stderr
        assert not (tmp_path / "venv").exists()

    @pytest.mark.parametrize(
        ("python", "told"), [("nowhere", "nowhere is no Python 3.11"), ("/bin/true", "is no Python 3.11")]
    )
    def test_another_python_is_refused(self, small: Path, tmp_path: Path, python: str, told: str) -> None:
        done = run(small, tmp_path / "venv", PYTHON=python)
        assert done.returncode == 1
        assert told in done.stderr

    def test_a_missing_image_a_missing_folder_and_a_used_folder_are_reported(self, small: Path, tmp_path: Path) -> None:
        assert "has no image" in run(small, "--image").stderr
        assert run(small).returncode == 2
        python = sys.executable if sys.version_info[:2] == (3, 11) else "python3.11"
        if shutil.which(python):
            assert "exists: name a new folder" in run(small, tmp_path, PYTHON=python).stderr

    def test_a_wheelhouse_that_is_empty_damaged_or_stale_is_not_packed(self, small: Path) -> None:
        root = small.parent.parent
        with pytest.raises(install.InstallError, match="has b 1"):
            bundle.check_lock(bundle.read_wheelhouse(root / "wheelhouse")[1], {"b": "2.0"})
        (root / "wheelhouse" / "b-1.0-py3-none-any.whl").write_bytes((small / "sbom.cdx.json").read_bytes())
        with pytest.raises(install.InstallError, match="lacks b==1"):
            bundle.make(root, "")
        (root / "wheelhouse" / "requirements.txt").unlink()
        with pytest.raises(install.InstallError, match="make wheelhouse"):
            bundle.make(root, "")


@pytest.mark.containers
@pytest.mark.timeout(900)
def test_a_site_without_network_installs_from_the_bundle_and_plans(tmp_path: Path) -> None:
    """The real wheels in a new environment, in its own network namespace where that is allowed."""
    python = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if os.environ.get(SWITCH) != "1" or not list((ROOT / "wheelhouse").glob("*.whl")) or not python:
        pytest.skip(f"needs {SWITCH}=1, Python 3.11 and wheels in wheelhouse/ (`make wheelhouse`)")
    isolated = ["unshare", "--net", "--map-root-user"]
    prefix = isolated if subprocess.run([*isolated, "true"], capture_output=True).returncode == 0 else []
    folder, _ = bundle.make(ROOT, "")
    venv = tmp_path / "venv"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    command = [*prefix, "sh", str(folder / "install.sh"), str(venv)]
    done = subprocess.run(command, env={**environment, "PYTHON": python}, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    for words in (["--help"], ["plan", str(ROOT / "configs" / "quickstart.yaml")]):
        done = subprocess.run(
            [venv / "bin" / "fl-privacy", *words], env=environment, capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, done.stderr
