"""The compose engine: `fl-privacy up CONFIG --engine compose`, every party a container of one image."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_privacy.config import Federation
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.engines import compose
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.deploy.engines.resume import Start, check
from fl_privacy.deploy.parties import parties
from fl_privacy.deploy.plan import new_run_name
from fl_privacy.deploy.preflight.checks import find_data
from fl_privacy.errors import Interrupted, LaunchError
from fl_privacy.models.initial import check as check_init
from fl_privacy.roles import ROLES
from fl_privacy.transcript.run import MANIFEST

IMAGE = "fl-privacy:{torch}"
RUNS = "/runs"
FIXES = {
    "could not select device driver": "install the NVIDIA Container Toolkit on this machine, or use device: cpu",
    "no space left on device": "make room, for instance with docker system prune",
}


class Project:
    """One federation's containers. The volumes stay: certificates and ledgers outlive a run."""

    def __init__(self, federation: Federation, run: str, runs_dir: Path, data_dir: Path | None) -> None:
        import docker
        from docker.errors import DockerException

        self.federation, self.run, self.runs_dir = compose.located(federation), run, runs_dir.resolve()
        self.name = f"fl-privacy-{federation.name}"
        try:
            self.client: Any = docker.from_env()
            self.client.ping()
        except DockerException as error:
            why = " ".join(str(error).split())[:120]
            raise LaunchError(f"docker: no engine answers ({why}); start Docker, or set DOCKER_HOST") from None
        folder = self.runs_dir / ".state" / run
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "federation.yaml"
        config.write_text(self.federation.to_yaml())
        config.chmod(0o644)
        Start(engine="compose", data_dir=data_dir and data_dir.resolve()).write(folder)
        image = self._image()
        self.file = folder / "compose.yaml"
        data = data_dir.resolve() if data_dir else None
        self.file.write_text(
            yaml.safe_dump(compose.document(self.federation, config, image, run, data), sort_keys=False)
        )

    def _image(self) -> str:
        from docker.errors import ImageNotFound

        cuda = any(site.device != "cpu" for site in self.federation.sites)
        image = IMAGE.format(torch="cuda" if cuda else "cpu")
        try:
            self.client.images.get(image)
        except ImageNotFound:
            raise LaunchError(f"image {image}: not found; build it with make image{' TORCH=cuda' * cuda}") from None
        return image

    def compose(self, *words: str) -> None:
        """Run `docker compose` on this project; an error has the last lines of its output."""
        if shutil.which("docker") is None:
            raise LaunchError("docker: command not found; install Docker with its Compose plugin")
        command = ["docker", "compose", "--project-name", self.name, "--file", str(self.file), *words]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            last = " | ".join(line.strip() for line in done.stderr.strip().splitlines()[-2:])
            fix = next((f"; {fix}" for sign, fix in FIXES.items() if sign in done.stderr), "")
            raise LaunchError(f"docker compose {words[0]}: {last}{fix}")

    def containers(self) -> dict[str, Any]:
        """By service."""
        label = f"com.docker.compose.project={self.name}"
        found = self.client.containers.list(all=True, filters={"label": label})
        return {container.labels["com.docker.compose.service"]: container for container in found}

    def take(self, service: str, path: str, target: Path) -> None:
        """Copy a file or folder out of a container, running or not."""
        from docker.errors import NotFound

        try:
            parts, _ = self.containers()[service].get_archive(path)
        except (KeyError, NotFound):
            raise LaunchError(f"container {service}: has no {path}; see docker compose -p {self.name} logs") from None
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as archive:
            archive.extractall(target, filter="data")


def up(
    federation: Federation,
    runs_dir: Path,
    data_dir: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    resume: Path | None = None,
) -> Result:
    """Run a federation to its end in containers; the run is copied to `runs_dir` and the containers are removed.

    A run to `resume` is on the server's volume, where `train` checks whether this config may resume it.
    """
    began = time.monotonic()
    check_init(federation)
    federation.route.check_launch(federation)
    find_data(federation, data_dir)
    runs_dir, run = (resume.parent, resume.name) if resume else (runs_dir, new_run_name(federation))
    if resume is not None and (resume / MANIFEST).exists():
        check(resume, federation)
    project = Project(federation, run, runs_dir, data_dir)
    try:
        project.compose("up", "--detach", "--no-build", "--remove-orphans")
        server = project.containers()["server"]
        reason = ""
        for raw in server.logs(stream=True, follow=True):
            line = raw.decode("utf-8", "replace").rstrip()
            say(line)
            reason = line.removeprefix("error: ") if line.startswith("error: ") else reason
        code = int(server.wait()["StatusCode"])
        reason = "; ".join(filter(None, [reason, *_sites_reasons(project)])) if code else reason
        if code and "(logs:" not in reason:
            raise LaunchError(reason or f"the server's container ended with {code}")  # it failed before there was a run
        project.take("server", f"{RUNS}/{project.run}", project.runs_dir)
        project.take("server", f"{RUNS}/.{project.run}.ca.pem", project.runs_dir)
        _collect(project)
        spent = _ledgers(project)
    except KeyboardInterrupt:
        raise Interrupted(project.runs_dir / run) from None
    finally:
        project.compose("down", "--timeout", "10")
    run_dir = project.runs_dir / project.run
    end = ("failed", reason) if code else ("completed", "")
    return Result.of(run_dir, end, time.monotonic() - began, spent)


def _sites_reasons(project: Project) -> list[str]:
    """Why sites gave up, from their containers: the server only sees that they are missing."""
    found = []
    there = project.containers()
    for name in project.federation.site_names:
        lines = there[name].logs(tail=20).decode("utf-8", "replace").splitlines() if name in there else []
        found += [f"{name}: {line.removeprefix('error: ')}" for line in lines if line.startswith("error: ")][-1:]
    return found


def _collect(project: Project) -> None:
    """Under `audit: true`, what each party recorded of the run, from its own volume."""
    if not project.federation.audit:
        return
    for role, name in parties(project.federation):
        group = ROLES[role].records
        if group and not ROLES[role].starts_runs:
            target = project.runs_dir / project.run / group
            with suppress(LaunchError):  # it recorded nothing
                project.take(name, f"/kit/{group}/{project.run}", target)
                shutil.rmtree(target / name, ignore_errors=True)  # of the run before it was resumed
                (target / project.run).rename(target / name)


def _ledgers(project: Project) -> list[dict[str, Any]]:
    """What each site has spent, from the ledger in its own volume."""
    federation, reports = project.federation, []
    with tempfile.TemporaryDirectory() as scratch:
        for name in federation.site_names:
            (Path(scratch) / name).mkdir()
            with suppress(LaunchError):  # a site that was never invited has none
                project.take(name, "/kit/state/ledger.jsonl", Path(scratch) / name)
            reports.append(ledgers.report(federation, name, Path(scratch) / name))
    return [report for report in reports if report is not None]
