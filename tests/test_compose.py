"""`docker compose up`: the files, and with an engine a federation in containers, some of which are killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import hearts
from containers import ROOT, docker, enabled
from fl_privacy.config import Federation
from fl_privacy.deploy.engines import compose, containers
from fl_privacy.errors import ConfigError, LaunchError

FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = FILE["services"]
README = (ROOT / "README.md").read_text()
PROJECT = f"fl-privacy-test-{os.getpid()}"
PATIENCE = 420
SITE_MEMORY = 700e6

GPUS = """
name: gpus
sites:
  - {name: north, device: "cuda:0"}
  - {name: south, device: "cuda:2"}
  - {name: west, device: cuda}
  - {name: east}
"""


class TestFile:
    def test_all_services_are_locked_down(self) -> None:
        for name, service in SERVICES.items():
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["read_only"] is True, name
            assert "privileged" not in service
            assert "ports" not in service, "sites open no port, and only containers reach the middleware"
            assert "environment" not in service, "secrets do not belong in the environment, and nothing else is needed"

    def test_the_server_and_the_sites_share_no_network(self) -> None:
        sites = [service for name, service in SERVICES.items() if "site-" in name]
        assert len(sites) == 10
        assert all(site["networks"] == ["sites"] for site in sites)
        assert SERVICES["server"]["networks"] == ["core"]
        assert all(network == {"internal": True} for network in FILE["networks"].values())

    def test_only_sites_start_as_one_person_s_trial(self) -> None:
        """Sites in containers on one machine start without a policy; no kit says so."""
        fitted = compose.document(Federation.parse(GPUS), ROOT / "c.yaml", "image", "run")["services"]
        told = [{name for name, one in found.items() if "--trial" in one["command"]} for found in (SERVICES, fitted)]
        assert told == [{name for name in SERVICES if "site-" in name}, {"north", "south", "west", "east"}]

    def test_each_kit_is_mounted_only_by_its_own_role(self) -> None:
        for name, service in SERVICES.items():
            kits = [volume for volume in service["volumes"] if volume.startswith("kit-")]
            if name != "init":
                assert kits == [f"kit-{name.removeprefix('gpu-')}:/kit"], name
        writers = [name for name, service in SERVICES.items() if "done:/done" in service["volumes"]]
        assert sorted(writers) == ["init", "server"]

    def test_every_gpu_site_has_one_gpu_set_by_its_own_variable(self) -> None:
        for number in range(5):
            devices = SERVICES[f"gpu-site-{number}"]["deploy"]["resources"]["reservations"]["devices"]
            assert devices == [
                {"driver": "nvidia", "device_ids": [f"${{SITE_{number}_GPU:-0}}"], "capabilities": ["gpu"]}
            ]

    def test_where_sites_aggregate_a_mailbox_has_a_volume_and_no_aggregator_does(self, tmp_path: Path) -> None:
        """Sites keep shards, journals and an initial model in their own volumes."""
        route = {"kind": "shards", "aggregators": 3, "placement": "sites", "masks": "round"}
        federation = Federation.model_validate({"sites": 3, "evaluate": "sites", "route": route})
        made = compose.document(compose.addressed(federation), tmp_path / "c.yaml", "image", "run")
        assert set(made["services"]) == {"superlink", "server", "mailbox", "site-0", "site-1", "site-2", "init"}
        assert "kit-mailbox:/kit" in made["services"]["mailbox"]["volumes"]
        assert set(made["services"]["site-0"]["depends_on"]) >= {"mailbox", "superlink"}
        assert all(f"kit-{name}:/kit" in made["services"][name]["volumes"] for name in federation.site_names)

    @pytest.mark.parametrize("config", ["quickstart", "shards"])
    def test_the_engine_generates_the_same_services(self, config: str) -> None:
        federation = Federation.load(ROOT / "configs" / f"{config}.yaml")
        made = compose.document(federation, Path("/f.yaml"), "fl-privacy:${TORCH:-cpu}", "a-run")
        for name, service in made["services"].items():
            ours = SERVICES[name]
            for key in (
                "cap_drop",
                "security_opt",
                "read_only",
                "tmpfs",
                "init",
                "restart",
                "networks",
                "network_mode",
            ):
                assert service.get(key) == ours.get(key), (name, key)
            assert set(service.get("depends_on", ())) <= set(ours.get("depends_on", ())), name
            # The generated file mounts only the data it was given, and the engine copies the run out of the container.
            assert set(service["volumes"][3:] if name == "init" else service["volumes"]) <= set(ours["volumes"]), name

    @pytest.mark.parametrize("config", ["rns", "mixes", "onions"])
    def test_every_mix_is_a_service_that_sites_and_server_wait_for(self, config: str) -> None:
        federation = Federation.load(ROOT / "configs" / f"{config}.yaml")
        made = compose.document(federation, Path("/f.yaml"), "image", "a-run")["services"]
        mixes = {name for _, name in federation.route.parties()}
        assert set(made) == {"init", "superlink", "server", *mixes, *federation.site_names}
        for name in ("server", *federation.site_names):
            assert mixes <= set(made[name]["depends_on"])

    @pytest.mark.parametrize("config", ["quickstart", "shards", "mixes", "hierarchical"])
    def test_every_party_that_listens_has_an_address(self, config: str) -> None:
        made = compose.addressed(Federation.load(ROOT / "configs" / f"{config}.yaml"))
        assert made.hosts is not None
        for role, name in made.route.parties():
            assert made.hosts.of(role, name) == f"{name}:9093"

    def test_a_federation_that_does_not_fit_is_refused_with_what_does(self, tmp_path: Path) -> None:
        for name in ("superlink", "server", "shuffler", "site-0", "site-1"):
            (tmp_path / name).mkdir()
        federation = Federation.load(ROOT / "configs" / "quickstart.yaml")
        with pytest.raises(ConfigError, match="--engine compose, which fits any"):
            compose.mounted(federation, tmp_path)

    def test_unused_roles_are_idle(self, tmp_path: Path) -> None:
        for name in SERVICES:
            if name != "init" and not name.startswith("gpu-"):
                (tmp_path / name).mkdir()
        federation = Federation.load(ROOT / "configs" / "quickstart.yaml")
        roles = compose.mounted(federation, tmp_path)
        assert ("aggregator", "aggregator-2") in roles
        assert len(roles) == 12

    def test_the_records_of_all_parties_are_copied_to_the_run(self, tmp_path: Path) -> None:
        class Volumes:
            federation = Federation.model_validate(
                {"name": "f", "sites": 2, "audit": True, "route": {"kind": "shuffler", "n_min": 2}}
            )
            runs_dir, run = tmp_path, "a-run"

            def take(self, service: str, path: str, target: Path) -> None:
                if service == "site-1":
                    raise LaunchError("nothing there")
                (target / Path(path).name).mkdir(parents=True)
                (target / Path(path).name / "from").write_text(f"{service}:{path}")

        collect: Any = containers._collect
        collect(Volumes())
        found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("from")}
        assert found == {
            "a-run/views/shuffler/from": "shuffler:/kit/views/a-run",
            "a-run/truth/site-0/from": "site-0:/kit/truth/a-run",
        }

    def test_the_readme_shows_the_command_that_is_tested_here(self) -> None:
        section = README.split("## In containers")[1].split("##")[0]
        commands = [line.split("#")[0].strip() for line in section.splitlines() if line.startswith("    ")]
        assert commands == ["make image", "docker compose up"]


@dataclass
class Stack:
    """`docker compose up`, running."""

    process: subprocess.Popen[str]
    env: dict[str, str]
    runs: Path

    def compose(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", "compose", *words], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 or not check, done.stderr[-2000:]
        return done.stdout

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", service)

    def until(self, met: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not met():
            assert time.monotonic() < end, f"{what}\n{self.logs('server')[-3000:]}"
            assert self.process.poll() is None, f"{what}: the run is over\n{self.logs('server')[-3000:]}"
            time.sleep(1)

    def crash(self, service: str) -> None:
        """Kill all its processes at once, as a fault would."""
        crash(f"{PROJECT}-{service}-1")

    def python(self, service: str, code: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "exec", "-T", service, "python", "-c", code]
        return subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60)


def crash(container: str) -> None:
    """Kill every process in a container, and wait until Docker restarts it."""
    docker("exec", container, "sh", "-c", "kill -9 -1", check=False)
    end = time.monotonic() + 60
    while docker("inspect", "--format", "{{.RestartCount}}", container).stdout.strip() == "0":
        assert time.monotonic() < end, f"{container} did not stop"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = enabled()
    if not list((ROOT / "wheelhouse").glob("*.whl")):
        pytest.skip("wheelhouse/ is empty: run `make wheelhouse`")
    done = subprocess.run(["make", "image"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = tmp_path_factory.mktemp("runs")
    runs.chmod(0o777)
    for above in runs.parents:
        if above.owner() == runs.owner() and above != Path("/") and not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)
    # One Flower message per round: with rounds of tenths of a second the run would end before anything is killed.
    config = runs.parent / "quickstart.yaml"
    config.write_text((ROOT / "configs" / "quickstart.yaml").read_text() + "rounds_per_message: 1\n")
    config.chmod(0o644)
    env = {**environment, "COMPOSE_PROJECT_NAME": PROJECT, "RUNS_DIR": str(runs), "FEDERATION": str(config)}
    with (runs.parent / "up.log").open("w") as log:
        process = subprocess.Popen(["docker", "compose", "up"], cwd=ROOT, env=env, stdout=log, stderr=log, text=True)
    made = Stack(process, env, runs)
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "5", check=False)
        process.kill()
        process.wait()


@pytest.mark.containers
@pytest.mark.parametrize(("profile", "sites"), [("cpu", "site-"), ("gpu", "gpu-site-")])
def test_every_profile_is_clean_and_has_its_sites(profile: str, sites: str) -> None:
    file = ("compose", "--file", ROOT / "docker-compose.yml", "--profile", profile, "config")
    quiet = docker(*file, "--quiet")
    assert quiet.stdout + quiet.stderr == ""
    services = docker(*file, "--services").stdout.split()
    assert sorted(name for name in services if "site" in name) == [f"{sites}{k}" for k in range(5)]


@pytest.mark.containers
@pytest.mark.timeout(1500)
class TestUp:
    """One run, in the order of these tests; a site, the shuffler and the SuperLink are killed while it runs."""

    def test_every_container_starts_locked_down(self, stack: Stack) -> None:
        stack.until(lambda: "round   1" in stack.logs("server"), "the first round")
        for line in stack.compose("ps", "--format", "json").splitlines():
            found = json.loads(docker("inspect", json.loads(line)["ID"]).stdout)[0]
            host = found["HostConfig"]
            assert found["Config"]["User"] == "10001:10001"
            assert host["CapDrop"] == ["ALL"]
            assert host["ReadonlyRootfs"]
            assert "no-new-privileges:true" in host["SecurityOpt"]
            assert not host["PortBindings"]
            assert found["State"]["Health"]["Status"] in ("healthy", "starting"), found["Name"]
            assert not [e for e in found["Config"]["Env"] if re.search("SECRET|KEY|TOKEN|PASS", e.split("=")[0])]

    def test_the_server_cannot_reach_a_site(self, stack: Stack) -> None:
        site = json.loads(stack.compose("ps", "--format", "json", "site-0").splitlines()[0])["ID"]
        networks = json.loads(docker("inspect", site).stdout)[0]["NetworkSettings"]["Networks"]
        (address,) = [network["IPAddress"] for network in networks.values()]
        reach = (
            "import socket, sys\nfor port in (22, 9092, 9093, 9094, 9464):\n"
            f"    s = socket.socket(); s.settimeout(1)\n    print(s.connect_ex(({address!r}, port)))"
        )
        done = stack.python("server", reach)
        codes = [int(code) for code in done.stdout.split()]
        assert len(codes) == 5
        assert 0 not in codes
        # Not refused by the site: there is no route to it.
        assert set(codes) <= {11, 101, 113, 115, 110}, codes
        assert stack.python("server", "import socket; socket.gethostbyname('site-0')").returncode != 0

    def test_a_site_is_small(self, stack: Stack) -> None:
        """Supervisor, worker, relay, SuperNode, executor and the processes that they fork; a shared page counts once.

        Measured between rounds: Flower starts a new ClientApp for each message, which ends when the reply is sent.
        """
        count = (
            "import os, psutil\n"
            "there = [p for p in psutil.process_iter(['cmdline']) if p.info['cmdline'] and p.pid != os.getpid()]\n"
            "sites = [p for p in there if 'clientapp' not in ' '.join(p.info['cmdline'])]\n"
            "def size(p):\n"
            "    try:\n        return p.memory_full_info().pss\n"
            # It has ended since it was listed, or the engine is starting a health check in it, which nobody can read.
            "    except (psutil.NoSuchProcess, psutil.AccessDenied):\n        return 0\n"
            "print(sum(map(size, sites)))"
        )
        done = stack.python("site-4", count)
        assert done.returncode == 0, done.stderr
        assert 3e8 < float(done.stdout) < SITE_MEMORY

    def test_it_completes_although_a_site_the_shuffler_and_the_superlink_are_killed(self, stack: Stack) -> None:
        assert "round   4" not in stack.logs("server")
        stack.crash("site-2")
        stack.crash("shuffler")
        stack.crash("superlink")
        assert stack.process.wait(PATIENCE) == 0
        printed = stack.logs("server")
        found = re.search(r"final accuracy (\d\.\d+) after 5 rounds", printed)
        assert found is not None, printed[-3000:]
        assert float(found[1]) >= 0.9
        for line in stack.compose("ps", "--all", "--format", "json").splitlines():
            assert json.loads(line)["ExitCode"] == 0, line

    def test_the_run_is_on_the_host_and_verifies(self, stack: Stack) -> None:
        (run,) = stack.runs.glob("quickstart-*")
        command = [sys.executable, "-m", "fl_privacy", "transcript", "verify", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_no_log_contains_a_key(self, stack: Stack) -> None:
        told = stack.compose("logs", "--no-color")
        assert "PRIVATE KEY" not in told
        mounted = ("--entrypoint", "cat", "--volume", f"{PROJECT}_kit-server:/kit", "fl-privacy:cpu")
        secret = docker("run", "--rm", *mounted, "/kit/secret").stdout.strip()
        assert len(secret) > 20
        assert secret not in told


@pytest.mark.containers
@pytest.mark.timeout(900)
def test_the_engine_runs_shards_and_survives_a_killed_aggregator(stack: Stack, tmp_path: Path) -> None:
    text = (ROOT / "configs" / "shards.yaml").read_text().replace("name: shards", f"name: shards-{os.getpid()}")
    config = tmp_path / "shards.yaml"
    config.write_text(text.replace("rounds: 5\nrounds_per_message: 5\n", "rounds: 6\nrounds_per_message: 2\n"))
    project = f"fl-privacy-shards-{os.getpid()}"
    command = [
        sys.executable,
        "-m",
        "fl_privacy",
        "up",
        str(config),
        "--engine",
        "compose",
        "--runs-dir",
        str(tmp_path),
    ]
    process = subprocess.Popen([*command, "--json"], cwd=ROOT, env=stack.env, stdout=subprocess.PIPE, text=True)
    try:
        name, end = f"{project}-aggregator-1-1", time.monotonic() + PATIENCE
        while "round   2" not in docker("logs", f"{project}-server-1", check=False).stdout:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(1)
        crash(name)
        printed, _ = process.communicate(timeout=PATIENCE)
        result = json.loads(printed.splitlines()[-1])
        assert (result["status"], result["rounds"]) == ("completed", 6)
        assert Path(result["path"], "manifest.json").exists()
        assert not docker("ps", "--all", "--quiet", "--filter", f"name={project}").stdout
    finally:
        process.terminate()
        process.wait(60)
        for volume in docker("volume", "ls", "--quiet", "--filter", f"name={project}").stdout.split():
            docker("volume", "rm", "--force", volume)


@pytest.mark.containers
@pytest.mark.timeout(900)
def test_an_interrupted_run_resumes_on_its_volumes_and_only_under_its_own_config(stack: Stack, tmp_path: Path) -> None:
    name, config = f"again-{os.getpid()}", tmp_path / "again.yaml"
    text = f"name: {name}\nsites: 3\nrounds: 150\ntask: {{train: {{epochs: 1}}}}\n"
    config.write_text(text)
    up = [sys.executable, "-m", "fl_privacy", "up"]
    words = [str(config), "--engine", "compose", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen([*up, *words], cwd=ROOT, env=stack.env, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE
        while "round   2" not in docker("logs", f"fl-privacy-{name}-server-1", check=False).stdout:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(1)
        process.terminate()  # as Ctrl-C, which a shell may have its background jobs ignore
        _, errors = process.communicate(timeout=PATIENCE)
        found = re.search(r"up --resume (\S+)", errors)
        assert found is not None, errors
        run = (ROOT / found[1]).resolve()
        config.write_text(text.replace("epochs: 1", "epochs: 2"))
        other = subprocess.run(
            [*up, str(config), "--resume", run], cwd=ROOT, env=stack.env, capture_output=True, text=True
        )
        assert "task.train.epochs: 1 -> 2" in other.stderr
        config.write_text(text.replace("rounds: 150", "rounds: 151"))
        done = subprocess.run(
            [*up, str(config), "--resume", run, "--json"], cwd=ROOT, env=stack.env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 151
        (change,) = json.loads((run / "manifest.json").read_text())["changes"]
        assert change["fields"] == [{"field": "rounds", "old": 150, "new": 151}]
    finally:
        process.terminate()
        process.wait(60)
        for volume in docker("volume", "ls", "--quiet", "--filter", f"name=fl-privacy-{name}").stdout.split():
            docker("volume", "rm", "--force", volume)


@pytest.mark.containers
@pytest.mark.timeout(900)
def test_one_file_per_container_gives_the_model_of_the_pooled_folder(stack: Stack, tmp_path: Path) -> None:
    name = f"hearts-{os.getpid()}"
    configs = {"compose": hearts.federation(name, hearts.spread(tmp_path)), "simulation": hearts.federation(name)}
    models = []
    for engine, values in configs.items():
        path = tmp_path / f"{engine}.yaml"
        path.write_text(yaml.safe_dump(values))
        data = ["--data-dir", str(hearts.data_folder())] if engine == "simulation" else []
        words = ["up", str(path), "--engine", engine, "--runs-dir", str(tmp_path / engine), "--json", *data]
        command = [sys.executable, "-m", "fl_privacy", *words]
        done = subprocess.run(command, cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        models.append(hearts.model_of(Path(json.loads(done.stdout.splitlines()[-1])["path"])))
    assert (models[0] == models[1]).all()


@pytest.mark.containers
@pytest.mark.timeout(300)
def test_every_site_gets_the_gpu_of_the_config(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_privacy.deploy.engines.containers import Project

    for key, value in stack.env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("COMPOSE_PROJECT_NAME")
    docker("tag", "fl-privacy:cpu", "fl-privacy:cuda")
    project = Project(Federation.parse(GPUS), "gpus-run", tmp_path, None)
    try:
        project.compose("create", "--no-build")
        asked = {name: found.attrs["HostConfig"]["DeviceRequests"] for name, found in project.containers().items()}
        for name, gpu in {"north": "0", "south": "2", "west": "0"}.items():
            (request,) = asked[name]
            assert request["Driver"] == "nvidia"
            assert request["DeviceIDs"] == [gpu]
            assert request["Capabilities"] == [["gpu"]]
        if shutil.which("nvidia-smi") is None:
            with pytest.raises(LaunchError, match=r"could not select device driver.*use device: cpu"):
                project.compose("run", "--no-deps", "north")
        assert not asked["east"]
        assert not asked["shuffler"]
    finally:
        project.compose("down", "--volumes")
        docker("image", "rm", "fl-privacy:cuda")


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command")
def test_without_an_engine_the_error_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fl_privacy",
        "up",
        str(ROOT / "configs" / "quickstart.yaml"),
        "--engine",
        "compose",
    ]
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nowhere.sock"}
    done = subprocess.run([*command, "--runs-dir", str(tmp_path)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"error: docker: no engine answers .*; start Docker, or set DOCKER_HOST\n", done.stderr)
