"""Everything that touches Flower's processes and control API; it is pinned to one Flower version."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.addresses import parse
from fl_privacy.deploy.programs import forking, program
from fl_privacy.errors import LaunchError
from fl_privacy.files import write_secret
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.tls import LocalKeys

APP = Path(__file__).parent / "flower_app"
START = 60.0


def superlink(address: str, keys: Keyring, database: Path) -> list[str]:
    """The command of a SuperLink that runs ServerApps itself. Its control API has no authentication: use loopback."""
    options = _superlink(address, (keys.certificate_file, keys.key_file, keys.authority_file), database)
    return [*forking("flower-superlink"), *options]


def superlink_behind_gate(address: str, local: LocalKeys, database: Path, secret: Path) -> list[str]:
    """The command of a SuperLink that runs no apps: a SuperExec that knows the secret runs the ServerApps.

    Its certificate is for loopback only, where the gate, its only caller, connects to it.
    """
    options = _superlink(address, (local.certificate, local.key, local.certificate), database)
    return [
        program("flower-superlink"),
        *options,
        "--isolation",
        "process",
        "--superexec-auth-secret-file",
        str(secret),
    ]


def _superlink(address: str, tls: tuple[Path, Path, Path], database: Path) -> list[str]:
    """With `tls` for its certificate, key and authority."""
    host, port = parse(address)
    options = ["--host", host, "--port", str(port), "--database", str(database), "--enable-supernode-auth"]
    for option, file in zip(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"), tls, strict=True):
        options += [option, str(file)]
    return [*options, "--disable-runtime-dependency-installation"]


def superexec(relay: str, certificate: Path, secret: Path) -> list[str]:
    """The command of the process that runs ServerApps on this machine, for a SuperLink behind `relay`."""
    command = [*forking("flower-superexec"), "--runtime-api-address", relay, "--root-certificates", str(certificate)]
    return [*command, "--superexec-auth-secret-file", str(secret)]


def relay(
    target: str,
    keys: Keyring,
    certificates: Path,
    listen: str = "127.0.0.1:0",
    proxy: str = "",
    user: int | None = None,
) -> list[str]:
    """The command of a relay to the gate at `target`; callers, `user` too, trust `certificates/relay.pem`."""
    command = [sys.executable, "-m", "fl_privacy.gate.relay", "--listen", listen, "--target", target]
    command += ["--keys", str(keys.folder), "--certificates", str(certificates)]
    command += [] if user is None else ["--user", str(user)]
    return [*command, "--proxy", proxy] if proxy else command


def gate(listen: str, superlink: str, local: LocalKeys, keys: Keyring, federation: str) -> list[str]:
    """The command of the gate in front of a SuperLink."""
    command = [sys.executable, "-m", "fl_privacy.gate.gate", "--listen", listen, "--superlink", superlink]
    command += ["--superlink-ca", str(local.certificate), "--keys", str(keys.folder)]
    return [*command, "--federation", federation]


def direct(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that keep Flower's loopback connections from going through a proxy."""
    names = [name for key in ("NO_PROXY", "no_proxy") for name in environ.get(key, "").split(",") if name.strip()]
    value = ",".join(dict.fromkeys([*names, "127.0.0.1", "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}


def supernode(superlink: str, authority: Path, key: Path, port: int, worker: Path) -> list[str]:
    """A SuperNode's command. The worker's socket is all that it knows about its site."""
    command = [*forking("flower-supernode"), "--superlink", superlink, "--root-certificates", str(authority)]
    command += ["--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--node-config", f'worker="{worker}"']


def node_key(path: Path) -> bytes:
    """Make a SuperNode's own key, which only authenticates it to the SuperLink; returns the public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def build_app(folder: Path = APP) -> bytes:
    """The app bundle (FAB) of a folder. Ours contains only a pyproject.toml."""
    from flwr.cli.build import build_fab_from_disk

    return bytes(build_fab_from_disk(folder))


def simulate(config: Mapping[str, str], sites: int, backend: Any) -> None:
    """Run our app on Flower's Simulation Runtime, in this process, until its ServerApp ends.

    `flwr run` ends in this call too, after it has started SuperLink, SuperExec and flwr-simulation, seconds later. The
    runtime has no setting for a backend other than Ray's, which it imports by name: `backend` is put in its place.
    """
    from flwr.app import Context, RecordDict
    from flwr.common.config import get_fused_config_from_dir, get_project_config
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType

    ray = "flwr.server.superlink.fleet.vce.backend.raybackend"
    sys.modules[ray] = SimpleNamespace(RayBackend=lambda settings: backend)  # type: ignore[assignment]
    run = Run.create_empty(run_id=1)
    run.primary_task_id, run.override_config, run.federation_id = 1, dict(config), NOOP_FEDERATION_ID
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
    components = get_project_config(APP)["tool"]["flwr"]["app"]["components"]
    _run_simulation(
        num_supernodes=sites,
        exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
        client_app_attr=components["clientapp"],
        server_app_attr=components["serverapp"],
        server_app_context=Context(
            1, SUPERLINK_NODE_ID, {}, RecordDict(), get_fused_config_from_dir(APP, run.override_config)
        ),
        app_dir=str(APP),
        run=run,
        backend_name="forks",
        is_app=True,
    )


@dataclass(frozen=True)
class Status:
    """A Flower run: pending, starting, running or finished; then completed, failed or stopped."""

    status: str
    sub_status: str
    details: str


class Unanswered(LaunchError):
    """The SuperLink could not be reached in time."""


class Control:
    """The SuperLink's control API."""

    def __init__(self, address: str, authority: Path) -> None:
        from flwr.proto import control_pb2
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self._address = address
        self._pb: Any = control_pb2
        os.environ.update(direct())
        self._client: Any = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def wait(self, alive: Callable[[], None], seconds: float = START) -> None:
        """Wait until the SuperLink answers; `alive` raises if it has died."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._client.ListRuns(self._pb.ListRunsRequest())
                return
            except httpx.HTTPError as error:
                alive()
                if time.monotonic() > until:
                    raise Unanswered(f"superlink {self._address}: no answer in {seconds:g} s ({error})") from None
                time.sleep(0.1)

    def register(self, public_key: bytes, name: str) -> None:
        self._client.RegisterNode(self._pb.RegisterNodeRequest(public_key=public_key, name=name))

    def nodes(self) -> dict[bytes, int]:
        """The registered SuperNodes: public key to Flower's id."""
        listed = self._client.ListNodes(self._pb.ListNodesRequest()).nodes_info
        return {bytes(node.public_key): int(node.node_id) for node in listed if not node.unregistered_at}

    def unregister(self, node: int) -> None:
        self._client.UnregisterNode(self._pb.UnregisterNodeRequest(node_id=node))

    def start_run(self, config: Mapping[str, str], app: bytes) -> int:
        """Submit an app bundle; returns Flower's id of the run."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.supercore.fab import Fab

        request = self._pb.StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(app).hexdigest(), app, {})),
            override_config=user_config_to_proto(dict(config)),
            federation="",
        )
        try:
            reply = self._client.StartRun(request)
        except httpx.HTTPError as error:
            raise LaunchError(f"superlink {self._address}: did not accept the run ({error}); try again") from None
        if not reply.HasField("run_id"):
            raise LaunchError("superlink: did not start the run; see its log")
        return int(reply.run_id)

    def status(self, run: int) -> Status:
        """How a run is doing. Flower's own commands return 0 even if a run failed."""
        found = self._client.ListRuns(self._pb.ListRunsRequest(run_id=run)).run_dict[run].status
        return Status(found.status, found.sub_status, found.details)

    def close(self) -> None:
        self._client.close()
