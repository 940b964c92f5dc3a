"""Certificates: commands for the authority and for the parties."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Json, app, show

commands = typer.Typer(help="Certificates: request, sign, install, renew, revoke.", no_args_is_help=True)
app.add_typer(commands, name="pki")

Folder = Annotated[Path, typer.Argument(metavar="AUTHORITY", help="The authority's folder.", show_default=False)]
Kit = Annotated[Path, typer.Argument(metavar="KIT", help="A party's kit.", show_default=False)]
Out = Annotated[Path | None, typer.Option("--out", help="File or folder to write to; default: the kit.")]


@commands.command()
def init(
    folder: Folder,
    federation: Annotated[str, typer.Option(help="The only federation that it signs for; default: any.")] = "",
    as_json: Json = False,
) -> None:
    """Make a new authority."""
    from fl_privacy.identity.pki import Authority
    from fl_privacy.identity.signing import fingerprint

    made = Authority.create(folder, federation)
    key = fingerprint(made.certificate.public_key())
    found = {"authority": str(folder), "key": key, "until": made.certificate.not_valid_after_utc.isoformat()}
    advice = "keep ca.key secret and backed up: anyone holding it can impersonate any party"
    show(found, as_json, [f"authority {folder}: {key}", advice])


def _asked(path: Path, asked: Any, as_json: bool) -> None:
    found = {**asked.describe(), "file": str(path)}
    hosts = f"  hosts {', '.join(found['hosts'])}" if found["hosts"] else ""
    lines = [f"{found['identity']}  key {found['key']}{hosts}"]
    lines += [f"node {found['node']}"] if "node" in found else []
    lines.append(f"send {path} to the authority, and give it the fingerprints over a separate channel")
    show(found, as_json, lines)


@commands.command()
def request(kit: Kit, out_: Out = None, as_json: Json = False) -> None:
    """Make this party's own key and a certificate request for the authority to sign."""
    from fl_privacy.deploy.kits import enrol

    _asked(*enrol.request(kit, out_), as_json)


@commands.command()
def renew(
    kit: Kit,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make a new key, do not keep the current one.")] = False,
    out_: Out = None,
    as_json: Json = False,
) -> None:
    """Request the next certificate; the current key proves who asks."""
    from fl_privacy.deploy.kits import enrol

    _asked(*enrol.renew(kit, new_key, out_), as_json)


@commands.command()
def sign(
    authority: Folder,
    requests: Annotated[list[Path], typer.Argument(metavar="REQUEST...", show_default=False)],
    days: Annotated[int | None, typer.Option(help="Days that certificates are valid; default: 90.")] = None,
    out_: Annotated[Path | None, typer.Option("--out", help="Folder; default: beside each request.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Also for a lost key or a new host name.")] = False,
    config: Annotated[Path | None, typer.Option(help="Also make the next roster of this federation.")] = None,
    as_json: Json = False,
) -> None:
    """Sign requests: all of them, or none if one is refused. The signed files bring the newest roster along."""
    from fl_privacy.config import Federation
    from fl_privacy.deploy.kits import enrol
    from fl_privacy.identity.pki import Authority

    federation = None if config is None else Federation.load(config)
    made = enrol.sign(Authority.load(authority), requests, days, out_, replace, federation)
    lines = []
    for one in made:
        hosts = f"  hosts {', '.join(one['hosts'])}" if one["hosts"] else ""
        lines.append(f"{one['identity']}  until {one['until'][:10]}  key {one['key']}{hosts}")
        if one["shared"]:
            lines.append(f"  shares a host name with {', '.join(one['shared'])}: correct only if they share a machine")
        lines += [f"  node {one['node']}"] if "node" in one else []
        lines.append(f"  {one['file']}")
    show(made, as_json, [*lines, "compare fingerprints and hosts with each party before you send the files back"])


@commands.command()
def install(
    kit: Kit,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A signed file, roster.json or revoked.pem.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Install what the authority sent; running roles pick it up."""
    from fl_privacy.deploy.kits import enrol

    found = enrol.install(kit, file)
    lines = [f"installed {found['installed']}: {found['file']}"]
    if "authority" in found:
        lines.append(f"{found['identity']}  until {found['until'][:10]}  authority {found['authority']}")
    if "accept" in found:
        lines.append(f"next: look at the roster (serial {found['accept']}) and accept it: fl-privacy site accept {kit}")
    show(found, as_json, lines)


@commands.command()
def roster(
    authority: Folder,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The federation's YAML.", show_default=False)],
    out_: Annotated[Path | None, typer.Option("--out", help="File or folder for a copy to send.")] = None,
    as_json: Json = False,
) -> None:
    """Make the federation's next roster: who is in it, with which key and for which organisation."""
    from fl_privacy.config import Federation
    from fl_privacy.deploy import rosters
    from fl_privacy.identity.pki import Authority

    found = rosters.make(Federation.load(config), Authority.load(authority), out_)
    lines = [
        f"roster of {found['federation']}: serial {found['serial']}, {found['members']} parties",
        *found["changes"],
    ]
    lines += [f"no certificate yet: {', '.join(found['missing'])}"] if found["missing"] else []
    lines += [f"digest {found['digest']}", f"send {found['file']} to every party: `fl-privacy pki install KIT FILE`"]
    show(found, as_json, [*lines, "at sites, the operator then runs `fl-privacy site accept KIT`"])


@commands.command()
def revoke(
    authority: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A party's name, or role/name.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Revoke all certificates of a party."""
    from fl_privacy.deploy.kits import enrol
    from fl_privacy.identity.keyring import Identity
    from fl_privacy.identity.pki import Authority
    from fl_privacy.roles import ROLES

    opened = Authority.load(authority)
    identity = enrol.find(opened, name)
    new = opened.revoke(identity)
    alive = {record.identity for record in opened.records() if not record.expired}
    # Those that it calls must know, and if it is called itself, also those that call it.
    called = ROLES[Identity.parse(identity).role].listens
    others = sorted(uri for uri in alive - {identity} if called or ROLES[Identity.parse(uri).role].listens)
    found = {"identity": identity, "revoked": [record.serial for record in new], "install_at": others}
    what = f"revoked {identity}: {len(new)} more certificates in {opened.revoked_file}"
    how = "to make it effective, run `fl-privacy pki install KIT revoked.pem` at:"
    show({**found, "file": str(opened.revoked_file)}, as_json, [what, how, *(f"  {uri}" for uri in others)])


@commands.command("list")
def list_(authority: Folder, as_json: Json = False) -> None:
    """List the certificates that the authority issued."""
    from fl_privacy.identity.pki import Authority

    opened = Authority.load(authority)
    revoked = opened.revoked()
    rows = []
    for record in opened.records():
        state = "revoked" if record.number in revoked else "expired" if record.expired else "valid"
        rows.append({**asdict(record), "state": state})
    show(rows, as_json, (f"{row['state']:<8} until {row['until'][:16]}  {row['identity']}" for row in rows))
