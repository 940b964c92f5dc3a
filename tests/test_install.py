"""The install script's decisions, and the lock file it reads. No network, no installs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


install = load("install")
lock = load("lock")


def report(version: str, *needs: str) -> dict[str, Any]:
    metadata = {"name": "torch", "version": version, "requires_dist": ["filelock", "sympy>=1.13.3", *needs]}
    return {"version": "1", "install": [{"metadata": metadata}]}


CPU = report("2.13.0+cpu")
CUDA = report("2.13.0", 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"', "triton==3.7.1")
PLAIN = report("2.13.0", 'optree>=0.13.0; extra == "optree"')


class Offer:
    """A stand-in for pip's configured sources that records its requests."""

    def __init__(self, **reports: dict[str, Any]) -> None:
        self.reports = {"torch==2.13.0" + suffix: reports.get(key) for key, suffix in (("plain", ""), ("cpu", "+cpu"))}
        self.asked: list[str] = []

    def __call__(self, requirement: str) -> dict[str, Any] | None:
        self.asked.append(requirement)
        return self.reports[requirement]


class TestTorch:
    @pytest.mark.parametrize(("found", "cpu"), [(CPU, True), (PLAIN, True), (CUDA, False), (None, False), ({}, False)])
    def test_cpu_build_is_recognised_by_version_or_requirements(self, found: dict[str, Any] | None, cpu: bool) -> None:
        assert install.is_cpu_build(found) is cpu

    @pytest.mark.parametrize("need", ["nvidia-nccl-cu13", "cuda-toolkit[cublas]==13.0.3", "cuda_bindings<14", "triton"])
    def test_any_cuda_requirement_rules_out_a_cpu_build(self, need: str) -> None:
        assert not install.is_cpu_build(report("2.13.0", need))

    def test_configured_cpu_build_is_used_without_another_index(self) -> None:
        source = install.choose_torch("2.13.0", "cpu", "linux", Offer(cpu=CPU))
        assert source == install.Source("torch==2.13.0+cpu", ("--no-deps",))

    def test_linux_without_one_uses_the_cpu_index_and_never_requests_the_cuda_wheel(self) -> None:
        offer = Offer(plain=CUDA)
        source = install.choose_torch("2.13.0", "cpu", "linux", offer)
        assert source.requirement == "torch==2.13.0+cpu"
        assert source.options[-2:] == ("--index-url", install.TORCH_CPU_INDEX)
        assert offer.asked == ["torch==2.13.0+cpu"]

    def test_macos_uses_the_plain_build(self) -> None:
        source = install.choose_torch("2.13.0", "cpu", "darwin", Offer(plain=PLAIN))
        assert source == install.Source("torch==2.13.0", ("--no-deps",))

    def test_cuda_uses_the_plain_build_with_its_requirements_and_queries_nothing(self) -> None:
        offer = Offer()
        assert install.choose_torch("2.13.0", "cuda", "linux", offer) == install.Source("torch==2.13.0")
        assert offer.asked == []


class TestCudaCheck:
    def test_cuda_stack_is_found(self) -> None:
        names = ["torch", "nvidia_cublas", "Triton", "cuda-bindings", "numpy"]
        assert install.cuda_packages(names) == ["cuda-bindings", "nvidia-cublas", "triton"]

    def test_lock_has_none(self) -> None:
        assert install.cuda_packages(install.read_lock((ROOT / "requirements.lock").read_text())) == []

    def test_cpu_environment_with_cuda_packages_is_refused_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        env = install.Environment(Path("unused"))
        monkeypatch.setattr(env, "installed", lambda: {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"})
        with pytest.raises(install.InstallError, match=r"^CUDA packages.*nvidia-nccl-cu13.*make clean install`$"):
            install.verify(env, "cpu")


def pythons(**versions: tuple[int, int, int]) -> Any:
    """A probe that knows only the given commands; a trailing _bare marks one without the venv module."""
    table = {}
    for key, version in versions.items():
        command = key.removesuffix("_bare").replace("_", ".")
        table[command] = install.Python(f"/bin/{command}", version, not key.endswith("_bare"))
    return table.get


class TestPython:
    def test_newest_supported_wins(self) -> None:
        probe = pythons(python3=(3, 14, 0), python3_11=(3, 11, 7), python3_12=(3, 12, 1))
        assert install.choose_python("", probe).executable == "/bin/python3.12"

    def test_default_is_used_when_no_versioned_command_runs(self) -> None:
        assert install.choose_python("", pythons(python3=(3, 11, 2))).version == (3, 11, 2)

    def test_request_wins(self) -> None:
        probe = pythons(python3_11=(3, 11, 7), python3_13=(3, 13, 0))
        assert install.choose_python("python3.11", probe).version == (3, 11, 7)

    def test_older_with_venv_is_preferred_to_newer_without(self) -> None:
        probe = pythons(python3_13_bare=(3, 13, 0), python3_11=(3, 11, 7))
        assert install.choose_python("", probe).version == (3, 11, 7)

    @pytest.mark.parametrize(
        ("requested", "probe", "fix"),
        [
            ("", pythons(), "apt-get install python3 python3-venv"),
            ("", pythons(python3=(3, 9, 2)), "apt-get install python3 python3-venv"),
            ("", pythons(python3_bare=(3, 11, 2)), "apt-get install python3.11-venv"),
            ("python3.9", pythons(python3_9=(3, 9, 2)), "PYTHON=python3.9 is 3.9.2: Python 3.11 to 3.13 is needed"),
            ("nowhere", pythons(python3_11=(3, 11, 7)), "PYTHON=nowhere does not run"),
        ],
    )
    def test_refusal_is_one_line_with_the_fix(self, requested: str, probe: Any, fix: str) -> None:
        with pytest.raises(install.InstallError) as refusal:
            install.choose_python(requested, probe)
        assert fix in str(refusal.value)
        assert "\n" not in str(refusal.value)

    def test_real_interpreter_is_probed_and_a_missing_one_is_none(self) -> None:
        found = install.probe_python(sys.executable)
        assert found.version == sys.version_info[:3]
        assert install.probe_python("no-such-python") is None


class TestStamp:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for name in ("requirements.lock", "pyproject.toml", "scripts/install.py", ".venv/bin/python"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        return tmp_path

    def complete(self, root: Path) -> Any:
        env = install.Environment(root / ".venv")
        env.write_stamp({**install.wanted_stamp(root, "cpu"), "python": "3.11.7"})
        return env

    def test_complete_environment_is_current(self, root: Path) -> None:
        assert install.is_current(self.complete(root).stamp(), install.wanted_stamp(root, "cpu"))

    @pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml", "scripts/install.py"])
    def test_changed_file_is_updated_in_place(self, root: Path, name: str) -> None:
        env = self.complete(root)
        (root / name).write_text("changed")
        wanted = install.wanted_stamp(root, "cpu")
        assert not install.is_current(env.stamp(), wanted)
        assert install.is_reusable(env.stamp(), wanted, install.Python("python3", (3, 11, 7), True))

    def test_other_flavour_or_python_needs_a_new_environment(self, root: Path) -> None:
        stamp = self.complete(root).stamp()
        python = install.Python("python3", (3, 11, 7), True)
        assert not install.is_reusable(stamp, install.wanted_stamp(root, "cuda"), python)
        assert not install.is_reusable(stamp, install.wanted_stamp(root, "cpu"), python._replace(version=(3, 12, 1)))

    def test_interrupted_install_leaves_no_stamp_and_starts_over(self, root: Path) -> None:
        env = install.Environment(root / ".venv")
        assert env.stamp() == {}
        (root / "requirements.lock").write_text("torch==2.13.0\n")
        names = [name for name, _ in install.steps(env, install.Python("python3", (3, 11, 7), True), "cpu", root)]
        assert names[0].startswith("creating")

    def test_environment_whose_interpreter_is_gone_has_no_stamp(self, root: Path) -> None:
        env = self.complete(root)
        env.python.unlink()
        assert env.stamp() == {}


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk"),
        ("OSError: libgomp.so.1: cannot open shared object file", "apt-get install libgomp1"),
        ("ERROR: No matching distribution found for torch==2.13.0", "PYTHON=python3.11"),
        ("anything else", "make clean"),
    ],
)
def test_failure_comes_with_a_hint(output: str, advice: str) -> None:
    assert advice in install.hint([output])


class TestLock:
    TEXT = (ROOT / "requirements.lock").read_text()

    def test_lines_are_exact_pins_without_addresses_paths_or_local_versions(self) -> None:
        lines = [line for line in self.TEXT.splitlines() if not line.startswith("#")]
        assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
        assert "://" not in self.TEXT
        assert len(lines) == len(install.read_lock(self.TEXT))

    def test_every_requirement_of_the_project_is_pinned_within_its_bounds(self) -> None:
        requirements = pytest.importorskip("packaging.requirements")
        pins = install.read_lock(self.TEXT)
        for text in lock.direct_requirements((ROOT / "pyproject.toml").read_text()):
            need = requirements.Requirement(text)
            assert need.specifier.contains(pins[install.normalise(need.name)]), text

    def test_supported_pythons_match_the_project(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert project["requires-python"] == ">={}.{}".format(*install.OLDEST)

    def test_freeze_becomes_pins_without_local_versions_project_and_pip(self) -> None:
        frozen = "-e /a/fl-privacy\nfl-privacy==0.1.0\npip==25.0\nzlib_ng==1.0\ntorch==2.13.0+cpu\nMako==1.4.3\n"
        assert lock.pins(frozen) == ["Mako==1.4.3", "torch==2.13.0", "zlib_ng==1.0"]


def test_make_passes_its_variables_on() -> None:
    command = ["make", "--dry-run", "install", f"PYTHON={sys.executable}", "TORCH=cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f'--python "{sys.executable}" --torch "cuda"' in done.stdout
