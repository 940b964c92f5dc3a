"""`fl-privacy provision CONFIG`: one start kit for every role of a federation."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from fl_privacy.addresses import host_of, parse, port_of, show
from fl_privacy.config import Address, Federation, Hosts, Pinned
from fl_privacy.deploy import flower, rosters
from fl_privacy.deploy.kits import kit_files
from fl_privacy.deploy.kits.kit import Folder, Kit, read_kit, write_kit
from fl_privacy.deploy.parties import dialled, parties, starters
from fl_privacy.errors import ConfigError, LaunchError
from fl_privacy.files import write_secret
from fl_privacy.identity import roster
from fl_privacy.identity.accepted import accept
from fl_privacy.identity.anchor import Anchor
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import Authority, install_crl
from fl_privacy.models.initial import check as check_init
from fl_privacy.roles import ROLES
from fl_privacy.tasks import accepted

EVERYWHERE, EVERYWHERE_6 = "0.0.0.0", "::"
METRICS = "127.0.0.1:9464"
OWN = ("proxy", "device", "data")


@dataclass(frozen=True)
class Choices:
    """Settings that all kits share."""

    metrics: Address | None = METRICS
    data: Path | None = None
    named_data: bool = False  # where it is not given, a site's kit reads the folder that the config names: for trials
    runs: Path = Path("runs")


def provision(
    federation: Federation,
    out: Path,
    authority: Anchor | None = None,
    sign: bool = False,
    choices: Choices | None = None,
    roles: list[tuple[str, str]] | None = None,
) -> list[Path]:
    """Write the kits; existing ones keep their keys, state and secret.

    With `sign`, all keys are made and signed here, for trials on one machine; otherwise each party makes its own.
    """
    if federation.hosts is None:
        raise ConfigError("hosts: missing; add the addresses of the SuperLink and the middleware (docs/deploying.md)")
    signer = authority if sign and isinstance(authority, Authority) else None
    if sign and signer is None:
        raise ConfigError("sign: needs --pki, the authority's folder with its key; make one with fl-privacy pki init")
    check_init(federation)
    federation.route.check_launch(federation)
    wanted = roles or parties(federation)
    chosen, made = choices or Choices(), []
    try:
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = _shared_secret(out, wanted)
        revoked = None if authority is None else authority.revocations()
        for _, name in wanted:
            _check_trust(out / name, authority)
        for role, name in wanted:
            folder = out / name
            kit = _with_own(folder, _kit(federation, federation.hosts, role, name, chosen))
            _write(folder, kit, _with_init(folder, federation, (role, name) in starters(federation)))
            if ROLES[role].secret:
                write_secret(folder / "secret", secret)
            if authority is not None:
                (folder / "keys" / "ca.pem").write_bytes(authority.pem)
                if revoked is not None:
                    install_crl(folder / "keys" / "revoked.pem", revoked, authority.certificate)
            if signer is not None:
                _sign(Folder.open(folder), signer)
                if ROLES[role].has_node and federation.task.is_own:
                    accepted.accept(federation, folder / "state")  # for trials, in which one person runs all sites
            made.append(folder)
        if signer is not None:
            _introduce(out, federation, signer)
            members = rosters.here(federation, signer, lambda _, name: Keyring(out / name / "keys"))
            signer.enlist(federation.name, members)
        if authority is not None:
            _enlist(made, federation.name, authority, accepted_here=sign)
    except OSError as error:
        raise LaunchError(
            f"out {out}: {error.filename}: {error.strerror}; free some space or use another --out"
        ) from None
    return made


def _kit(federation: Federation, hosts: Hosts, role: str, name: str, choices: Choices) -> Kit:
    known = ROLES[role]
    address = hosts.of(role, name) if known.listens else None
    superlink, evaluator = (dialled(federation, known, name, service) for service in ("superlink", "evaluator"))
    return Kit(
        federation=federation.name,
        digest=federation.digest,
        role=role,
        name=name,
        listen=_listen(address) if address else None,
        hosts=(host_of(address),) if address else (),
        superlink=next(iter(superlink), None),
        middleware=dialled(federation, known, name, "middleware"),
        evaluator=next(iter(evaluator), None),
        metrics=choices.metrics,
        data=_data(federation, name, known.has_node, choices) if known.data else None,
        runs=choices.runs,
    )


def _data(federation: Federation, name: str, is_site: bool, choices: Choices) -> Path | None:
    """The folder to read; of a site's in the config only in a trial, because a site decides for itself."""
    named = federation.site(name).data if is_site and choices.named_data else None
    return choices.data or named


def _listen(address: Address) -> Address:
    """All interfaces of the machine, for IPv4 or IPv6 as in its address."""
    host, port = parse(address)
    return show(EVERYWHERE_6 if ":" in host else EVERYWHERE, port)


def _with_own(folder: Path, kit: Kit) -> Kit:
    """Keep what the machine's owner has set in an existing kit."""
    if not (folder / "kit.yaml").exists():
        return kit
    old = read_kit(folder)
    if (old.federation, old.role, old.name) != (kit.federation, kit.role, kit.name):
        raise LaunchError(
            f"kit {folder}: belongs to {old.role} {old.name} of {old.federation!r}; choose another "
            "--out (in containers: docker compose -p NAME up)"
        )
    given = {name: getattr(old, name) for name in OWN if getattr(kit, name) is None}
    own = {name: value for name, value in given.items() if value is not None}
    if old.listen and kit.listen and port_of(old.listen) == port_of(kit.listen):
        own["listen"] = old.listen  # the owner may have chosen one interface
    return kit.model_copy(update={**own, "metrics": old.metrics})  # no metrics at all is also a choice


def _write(folder: Path, kit: Kit, federation: Federation) -> None:
    for made in (folder, folder / "keys", folder / "state", folder / "logs"):
        made.mkdir(exist_ok=True, mode=0o700)
    write_kit(folder, kit)
    (folder / "federation.yaml").write_text(federation.to_yaml())
    (folder / "README.md").write_text(kit_files.readme(kit))
    kit_files.write(Folder(folder, kit, federation))


def _with_init(folder: Path, federation: Federation, starts: bool) -> Federation:
    """The federation as a kit has it: the initial model lies in the kits of the parties that start from it."""
    if federation.init is None:
        return federation
    folder.mkdir(exist_ok=True, mode=0o700)
    if starts:
        federation.init.placed(folder, "init")
    own = Pinned(file=Path(f"init{federation.init.file.suffix}"), sha256=federation.init.sha256)
    return federation.model_copy(update={"init": own})


def _shared_secret(out: Path, wanted: list[tuple[str, str]]) -> bytes:
    """The SuperExec's secret, the same for the SuperLink and the server; provisioning again keeps it."""
    for file in (out / name / "secret" for role, name in wanted if ROLES[role].secret):
        if file.exists():
            return file.read_bytes()
    return secrets.token_hex(32).encode()


def _check_trust(folder: Path, authority: Anchor | None) -> None:
    """A kit trusts one authority from the start; it is never replaced by another one."""
    file = folder / "keys" / "ca.pem"
    if authority is not None and file.exists() and file.read_bytes() != authority.pem:
        raise LaunchError(f"kit {folder}: trusts another authority; use that one's --pki, or another --out")


def _sign(folder: Folder, authority: Authority) -> None:
    authority.keep(folder.identity, folder.keys.folder, folder.kit.hosts)
    if folder.role.has_node and not folder.node_key.exists():
        folder.node_key.parent.mkdir(exist_ok=True, mode=0o700)
        (folder.node_key.parent / "node.pub").write_bytes(flower.node_key(folder.node_key))


def _enlist(kits: list[Path], federation: str, authority: Anchor, accepted_here: bool) -> None:
    """Give every kit the newest roster, if there is one; in trials, one person runs all sites and accepts it."""
    found = authority.roster(federation)
    if found is None:
        return
    data = authority.roster_file(federation).read_bytes()
    for folder in map(Folder.open, kits):
        roster.install(folder.keys.roster_file, data, authority.certificate)
        if accepted_here and folder.role.has_node:
            accept(found, folder.state)


def _introduce(out: Path, federation: Federation, authority: Authority) -> None:
    """Put the sites' public keys into the SuperLink's kit, except those of revoked sites."""
    nodes = out / "superlink" / "nodes"
    nodes.mkdir(exist_ok=True)
    for name in federation.site_names:
        key = out / name / "node" / "node.pub"
        if key.exists() and not authority.has_revoked(Keyring(out / name / "keys")):
            (nodes / f"{name}.pub").write_bytes(key.read_bytes())
