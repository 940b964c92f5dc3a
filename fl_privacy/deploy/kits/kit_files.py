"""What a kit has besides its config: a systemd unit, a compose file, and a README on how to use them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from fl_privacy.addresses import port_of, show
from fl_privacy.deploy.engines import compose as services
from fl_privacy.deploy.kits.kit import Folder, Kit
from fl_privacy.roles import ROLES

HOME = "/srv/fl-privacy"
PROGRAM = "/opt/fl-privacy/bin/fl-privacy"
HOMES = ("/home/", "/root/")
MARK = "# Written by fl-privacy ({digest}); once you change this file, it is left alone.\n"

COMMON = """\
KillMode=mixed
TimeoutStopSec=30
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome={see_home}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
ReadWritePaths={writes}
"""

UNIT = """\
# For fl-privacy in /opt/fl-privacy and a user for it: useradd --system --home-dir /nonexistent fl-privacy
# Copy the kit to {home}/{name}, owned by that user; then
#   systemctl link {home}/{name}/fl-privacy-{name}.service && systemctl enable --now fl-privacy-{name}
[Unit]
Description=fl-privacy: {role} {name} of federation {federation}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User=fl-privacy
ExecStart={program} serve {home}/{name}
Restart=on-failure
RestartSec=5
# 2: an error that somebody must fix; starting again would not help.
RestartPreventExitStatus=2
{common}
[Install]
WantedBy=multi-user.target
"""

TRAIN_UNIT = """\
# For fl-privacy in /opt/fl-privacy and a user for it: useradd --system --home-dir /nonexistent fl-privacy
# Copy the kit to {home}/{name}, owned by that user; then
#   systemctl link {home}/{name}/fl-privacy-{name}.service && systemctl start --no-block fl-privacy-{name}
# Starts one run, or resumes an interrupted one; follow it with journalctl -fu fl-privacy-{name}
[Unit]
Description=fl-privacy: a run of federation {federation}
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
User=fl-privacy
ExecStart={program} train {home}/{name}
TimeoutStartSec=infinity
{common}"""

COMPOSE = """\
# One container for this kit: chown -R 10001:10001 . && docker compose up -d
# Mounts and devices are those in kit.yaml; after a change there, run fl-privacy refresh .
"""

ENROL = """\
1. Make this machine's own key and a certificate request; the key never leaves the machine:
   `fl-privacy pki request .`
2. Send `{name}.request.json` to the federation's operator, and give them its fingerprint over a separate channel
   (by telephone).
3. They send back `{name}.signed.json`. Install it: `fl-privacy pki install . {name}.signed.json`
"""

TEXTS = {
    "site": """\
This machine holds the data. It trains, protects the update and uploads it. It opens no port: every connection goes
out, to the SuperLink ({superlink}){and_middleware}.

- In `kit.yaml`, set `data` to your data folder, `device` to the GPU if there is one, `policy` to your own policy file
  (what this site allows: see docs/privacy.md), and `proxy` if connections leave through an HTTP proxy.
- `state/ledger.jsonl` records the privacy budget that you have spent. Never restore an older copy of it.
- Start, stop and check the site: `fl-privacy site start .`, `fl-privacy site stop .`, `fl-privacy site status .`
- Do not run the server, the SuperLink or any middleware of this federation on this machine.
""",
    "superlink": """\
This machine runs Flower's SuperLink behind a gate. Sites and the server connect to {listen}; nobody else needs to.

- To admit a site, install its `NAME.signed.json` here: `fl-privacy pki install . NAME.signed.json`. To remove it,
  delete `nodes/NAME.pub`.
- `secret` is shared with the server's kit only.
- Start: `fl-privacy serve .`
""",
    "server": """\
This machine starts runs, combines what the middleware releases, and keeps the transcripts in `runs/`.

- Once the SuperLink, the middleware and a quorum of sites are up: `fl-privacy train .`
  This resumes an interrupted run; `--new` starts another one instead.
- Do not run a site, the shuffler or an aggregator on this machine.
""",
    "shuffler": """\
This machine mixes the sites' updates and hands the mixture to the server. It sees every update and who sent it, so
its operator must not be the server's operator. Sites and the server connect to {listen}.

- Start: `fl-privacy serve .`
""",
    "aggregator": """\
This machine averages one shard of every update. Each aggregator needs a different operator, because whoever holds all
shards holds the updates. Sites, the server and the evaluator connect to {listen}.

- `state/` holds this shard of the model.
- Start: `fl-privacy serve .`
""",
    "evaluator": """\
This machine joins the shards, evaluates the model and reports only the score to the server. The server connects to
{listen}.

- In `kit.yaml`, set `data` to the held-out data.
- Start: `fl-privacy serve .`
""",
}
TEXT = """\
This machine is dialled at {listen}.

- Start: `fl-privacy serve .`
"""
BACKUP = "- Back up {paths} between runs, and the keys.\n"

README = """\
# {title} of federation {federation}

{text}
## Setting up

{enrol}4. Check everything: `fl-privacy preflight .`
5. {start}
   Both are made from `kit.yaml`: after a change there, `fl-privacy refresh .` writes them again, unless you have edited
   them yourself.

Certificates are short-lived. `fl-privacy pki renew .` makes the next request; installing the answer needs no restart.
The complete guide, with firewalls, upgrades, backups and troubleshooting: docs/deploying.md.
"""


def unit(folder: Folder) -> str:
    kit = folder.kit
    paths = [path for path, _ in _outside(folder)]
    common = COMMON.format(
        see_home="read-only" if any(str(path).startswith(HOMES) for path in paths) else "yes",
        writes=" ".join([f"{HOME}/{kit.name}", *(str(path) for path, writes in _outside(folder) if writes)]),
    )
    facts = {"role": kit.role, "name": kit.name, "federation": kit.federation, "common": common}
    return (TRAIN_UNIT if folder.role.starts_runs else UNIT).format(**facts, home=HOME, program=PROGRAM)


def compose(folder: Folder) -> str:
    kit, runs = folder.kit, folder.role.starts_runs
    device = folder.own_federation.site(kit.name).device if folder.role.has_node else "cpu"
    made = {**services.COMMON, "image": f"fl-privacy:${{TORCH:-{'cpu' if device == 'cpu' else 'cuda'}}}"}
    made["command"] = ["train" if runs else "serve", "/kit"]
    made["volumes"] = ["./:/kit", *(_mount(path, writes) for path, writes in _outside(folder))]
    made["restart"] = "no" if runs else "unless-stopped"  # also after a reboot
    if kit.listen:
        port = port_of(kit.listen)
        made["ports"] = [f"{port}:{port}"]
    services.reserve(made, device)
    whole = {"name": f"fl-privacy-{kit.name}", "services": {kit.name: made}}
    return COMPOSE + yaml.safe_dump(whole, sort_keys=False, width=1000)


def _outside(folder: Folder) -> list[tuple[Path, bool]]:
    """Absolute paths that a role needs outside its kit, and whether it writes to them; relative ones are in the kit."""
    kit, role = folder.kit, folder.role
    found: list[tuple[Path | None, bool]] = [(kit.data if role.data else None, False)]
    if role.has_node:
        site = folder.own_federation.site(kit.name)
        found = [(kit.data or site.data, False), (kit.policy or site.policy, False)]
    if role.starts_runs:
        found.append((kit.runs, True))
    return [(path, writes) for path, writes in found if path is not None and path.is_absolute()]


def _mount(path: Path, writes: bool) -> dict[str, Any]:
    """Mounted at the same path; Docker must not create a folder if the path does not exist."""
    made = {"type": "bind", "source": str(path), "target": str(path), "bind": {"create_host_path": False}}
    return made if writes else {**made, "read_only": True}


def write(folder: Folder) -> None:
    """Write the compose file and the unit from kit.yaml; files edited by hand stay as they are."""
    keep = kept(folder)
    for path, text in _files(folder).items():
        if path not in keep:
            path.write_text(text)


def kept(folder: Folder) -> list[Path]:
    """The files that were edited by hand and differ from what would be written."""
    return [path for path, text in _files(folder).items() if path.exists() and _edited(path, text)]


def _files(folder: Folder) -> dict[Path, str]:
    texts = {"compose.yml": compose(folder), f"fl-privacy-{folder.kit.name}.service": unit(folder)}
    return {folder.path / name: MARK.format(digest=_digest(text)) + text for name, text in texts.items()}


def _edited(path: Path, wanted: str) -> bool:
    """Whether the file is neither what its first line says was written nor what is wanted."""
    text = path.read_text(errors="replace")
    first, _, rest = text.partition("\n")
    return text != wanted and first + "\n" != MARK.format(digest=_digest(rest))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def readme(kit: Kit) -> str:
    where = " and ".join(kit.middleware)
    dialled = show(kit.hosts[0], port_of(kit.listen)) if kit.hosts and kit.listen else kit.listen
    facts = {"superlink": kit.superlink, "listen": dialled, "and_middleware": f" and to {where}" if where else ""}
    text = TEXTS.get(kit.role, TEXT).format(**facts)
    if backup := ROLES[kit.role].backup:
        text += BACKUP.format(paths=" and ".join(f"`{path}`" for path in backup))
    enrol = ENROL.format(name=kit.name)
    title = kit.name if kit.name.startswith(kit.role) else f"{kit.role} {kit.name}"
    start = f"Start it with systemd (`fl-privacy-{kit.name}.service`) or in a container (`compose.yml`); each says how."
    return README.format(start=start, title=title, federation=kit.federation, text=text, enrol=enrol)
