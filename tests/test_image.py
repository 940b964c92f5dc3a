"""The image: its build files, and with an engine the built image itself."""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import LOCKED_DOWN, ROOT, docker, enabled

sys.path.insert(0, str(ROOT / "scripts"))
slim = importlib.import_module("slim")

DOCKERFILE = (ROOT / "Dockerfile").read_text()
FINAL = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[-1]
IMAGE = "fl-privacy:cpu"


class TestFiles:
    def test_no_frontend_is_fetched_and_every_stage_has_the_same_base(self) -> None:
        assert not re.search(r"^#\s*syntax", DOCKERFILE, flags=re.MULTILINE | re.IGNORECASE)
        stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", DOCKERFILE, flags=re.MULTILINE)
        assert stages[0] == ("python:3.11-slim-bookworm", "base")
        assert {source for source, _ in stages[1:]} <= {name for _, name in stages}
        assert len(stages) > 2

    def test_the_lock_applies_to_every_dependency(self) -> None:
        assert "--constraint /build/requirements.lock -r /build/needs.txt" in DOCKERFILE
        assert "--require-hashes" in DOCKERFILE

    def test_the_project_is_copied_last_and_does_not_invalidate_its_dependencies(self) -> None:
        before = DOCKERFILE[: DOCKERFILE.index("AS project")]
        copied = re.findall(r"^COPY (?!--from)(.*)$", before, flags=re.MULTILINE)
        assert copied == ["pyproject.toml /", "requirements.lock /build/", "scripts/slim.py /build/"]
        assert re.findall(r"^COPY (.*)$", FINAL, flags=re.MULTILINE)[-1] == "--from=project /layer /"

    @pytest.mark.parametrize(
        "path",
        [".git", "runs", ".venv", "data", ".env", "dist", "tests", "keys", "authority", ".ci", "benchmarks"],
    )
    def test_the_builder_does_not_receive(self, path: str) -> None:
        assert not sent(path)
        assert not sent(f"{path}/inside")

    @pytest.mark.parametrize(
        "path", ["pyproject.toml", "requirements.lock", "fl_privacy/config/federation.py", "wheelhouse/a.whl"]
    )
    def test_the_builder_receives(self, path: str) -> None:
        assert sent(path)

    def test_everything_copied_is_in_the_build_context(self) -> None:
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, flags=re.MULTILINE):
            assert all(sent(path) and (ROOT / path).exists() for path in line.split()[:-1]), line


@pytest.mark.parametrize("name", ["uvloop/loop", "numpy/_core/_multiarray_umath", "psutil/_psutil_linux"])
def test_a_library_without_its_symbol_tables_still_loads(tmp_path: Path, name: str) -> None:
    packages = Path(sysconfig.get_path("platlib"))
    shutil.copytree(packages / name.split("/")[0], tmp_path / name.split("/")[0])
    for libraries in packages.glob("numpy.libs" if "numpy" in name else "nothing"):
        shutil.copytree(libraries, tmp_path / libraries.name)
    saved = [slim.strip(path) for path in slim.libraries(tmp_path)]
    assert all(slim.strip(path) == 0 for path in slim.libraries(tmp_path))
    assert max(saved) > 0 or name != "uvloop/loop"
    code = f"import {name.replace('/', '.')} as m; assert m.__file__.startswith({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last line that matches it or a parent folder decides."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    through = True
    above = [path, *map(str, Path(path).parents)][:-1]
    for line in (line for line in lines if line and not line.startswith("#")):
        pattern = line.lstrip("!").removeprefix("**/")
        if any(fnmatch.fnmatch(name, pattern) for name in above):
            through = line.startswith("!")
    return through


@pytest.fixture(scope="module")
def image() -> str:
    """The image as `make image` builds it; from the cache if nothing has changed."""
    environment = enabled()
    if not list((ROOT / "wheelhouse").glob("*.whl")):
        pytest.skip("wheelhouse/ is empty: run `make wheelhouse`")
    done = subprocess.run(["make", "image"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return IMAGE


@pytest.fixture(scope="module")
def config(image: str) -> Any:
    return json.loads(docker("image", "inspect", image).stdout)[0]


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    """An idle container, locked down like every role."""
    name = docker(
        "run", "--detach", *LOCKED_DOWN, "--volume", "/kit", "--entrypoint", "sleep", image, "300"
    ).stdout.strip()
    yield name
    docker("rm", "--force", "--volumes", name)


@pytest.mark.containers
@pytest.mark.timeout(1200)
class TestImage:
    def test_it_is_under_1600_mb(self, config: Any) -> None:
        assert config["Size"] < 1.6e9

    def test_it_runs_as_a_user_with_a_health_check(self, config: Any) -> None:
        assert config["Config"]["User"] == "10001:10001"
        assert config["Config"]["Healthcheck"]["Test"][0] == "CMD"
        assert config["Config"]["StopSignal"] == "SIGTERM"

    def test_no_layer_and_no_variable_contains_a_secret(self, image: str, config: Any) -> None:
        told = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image).stdout
        told += "\n".join(config["Config"]["Env"])
        assert not re.search(r"password|passwd=|token|PRIVATE KEY|credential|://[^/\s]+@", told, flags=re.IGNORECASE)

    def test_no_file_is_a_key_a_setting_or_a_build_leftover(self, container: str) -> None:
        names = ("*.key", "id_*sa", ".env", ".netrc", "pip.conf", ".git", "*.whl", ".cache", "ledger.*l")
        tests = " -o ".join(f"-name '{name}'" for name in names)
        command = f"find / -xdev \\( {tests} \\) -print 2>/dev/null; ls -A /kit /pki /runs /data /done"
        found = docker("exec", container, "sh", "-c", command).stdout.split()
        of_the_base = ("/usr/share/python-wheels/", "/usr/local/lib/python3.11/ensurepip/")
        assert [path for path in found if not path.endswith(":") and not path.startswith(of_the_base)] == []

    def test_no_file_contains_a_private_key(self, container: str) -> None:
        command = "grep -rIl --include='*.pem' --include='*.crt' -e '-----BEGIN.*PRIVATE KEY' /opt /etc /configs"
        assert docker("exec", container, "sh", "-c", command, check=False).stdout == ""

    def test_there_is_no_compiler_and_no_development_tool(self, container: str) -> None:
        command = "for p in gcc cc g++ ld make pytest ruff mypy git; do command -v $p; done; true"
        assert docker("exec", container, "sh", "-c", command).stdout == ""

    def test_health_is_a_file_touched_within_15_seconds(self, container: str, config: Any) -> None:
        def healthy(before: str) -> bool:
            docker("exec", container, "sh", "-c", before)
            return docker("exec", container, *config["Config"]["Healthcheck"]["Test"][1:], check=False).returncode == 0

        assert not healthy("true")
        assert healthy("mkdir -p /kit/run && touch /kit/run/healthy")
        assert not healthy("touch -d '16 seconds ago' /kit/run/healthy")

    def test_a_change_of_code_is_built_in_under_20_seconds(self, image: str, tmp_path: Path) -> None:
        for path in ROOT.iterdir():
            if path.name == "wheelhouse":
                shutil.copytree(path, tmp_path / path.name, copy_function=os.link)
            elif sent(path.name) or path.name in ("Dockerfile", ".dockerignore", "scripts"):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        tag = f"fl-privacy:test-{os.getpid()}"
        try:
            docker("build", "--tag", tag, tmp_path)
            with (tmp_path / "fl_privacy" / "errors.py").open("a") as file:
                file.write(f"\nCHANGED = {time.time()}\n")
            start = time.monotonic()
            docker("build", "--tag", tag, tmp_path)
            assert time.monotonic() - start < 20
        finally:
            docker("image", "rm", tag, check=False)
