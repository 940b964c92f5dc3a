"""What a kit has besides its config: a systemd unit, a compose file, and a page on what to do with them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from fl_privacy.deploy.engines import compose as services
from fl_privacy.deploy.kits.kit import Folder, Kit

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
# {home}/{name}: copy the kit there, owned by that user; then
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
# 2: something for a person to mend; starting again would not help.
RestartPreventExitStatus=2
{common}
[Install]
WantedBy=multi-user.target
"""

TRAIN_UNIT = """\
# For fl-privacy in /opt/fl-privacy and a user for it: useradd --system --home-dir /nonexistent fl-privacy
# {home}/{name}: copy the kit there, owned by that user; then
#   systemctl link {home}/{name}/fl-privacy-{name}.service && systemctl start --no-block fl-privacy-{name}
# One run, or the rest of one that was broken off; how it goes: journalctl -fu fl-privacy-{name}
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
# Mounts and devices are those of kit.yaml; after a change there: fl-privacy refresh .
"""

ENROL = """\
1. Make this machine's own key and a request for a certificate; the key never leaves the machine:
   `fl-privacy pki request .`
2. Send `{name}.request.json` to the federation's operator, and tell them its fingerprint by another way (telephone).
3. They send back `{name}.signed.json`: `fl-privacy pki install . {name}.signed.json`
"""

TEXTS = {
    "site": """\
This machine holds the data. It trains, protects the update and sends it out. It opens no port: every connection goes
outwards, to the SuperLink ({superlink}){and_middleware}.

- `kit.yaml`: set `data` to your data folder, `device` to the GPU if there is one, `policy` to your own policy file
  (what this site allows: see docs/privacy.md), and `proxy` if the way out is through an HTTP proxy.
- `state/ledger.jsonl` is the account of the privacy budget you have spent. Back it up; never restore an older one.
- Start, stop, look: `fl-privacy site start .`, `fl-privacy site stop .`, `fl-privacy site status .`
- Do not run here: the server, the SuperLink or any middleware of the same federation.
""",
    "superlink": """\
This machine runs Flower's SuperLink behind a gate. Sites and the server connect to {listen}; nobody else needs to.

- A site joins when its `NAME.signed.json` is installed here: `fl-privacy pki install . NAME.signed.json`. It leaves
  when `nodes/NAME.pub` is deleted.
- `secret` is shared with the server's kit alone.
- Start: `fl-privacy serve .`
""",
    "server": """\
This machine starts runs, combines what the middleware releases, and keeps the transcripts in `runs/`.

- With the SuperLink, the middleware and a quorum of sites up: `fl-privacy train .`
  A run that was broken off is gone on with; `--new` starts another.
- Do not run here: a site, the shuffler or an aggregator.
""",
    "shuffler": """\
This machine mixes the sites' updates and hands the mixture to the server. It sees every update and who sent it: whoever
runs it must not be whoever runs the server. Sites and the server connect to {listen}.

- Start: `fl-privacy serve .`
""",
    "aggregator": """\
This machine averages one shard of every update. It must be run by another party than the other aggregators, for those
who hold all shards hold the updates. Sites, the server and the evaluator connect to {listen}.

- `state/` is this shard of the model; back it up between runs.
- Start: `fl-privacy serve .`
""",
    "evaluator": """\
This machine joins the shards, evaluates the model and tells the server the score alone. The server connects to
{listen}.

- `kit.yaml`: set `data` to the held-out data.
- Start: `fl-privacy serve .`
""",
}

README = """\
# {title} of federation {federation}

{text}
## Setting up

{enrol}4. Check everything: `fl-privacy preflight .`
5. {start}
   They are made from `kit.yaml`: after a change there, `fl-privacy refresh .` makes them anew, unless you have edited
   them yourself.

Certificates are short-lived. `fl-privacy pki renew .` makes the next request; installing the answer needs no restart.
The whole way, with firewalls, upgrades, backups and what to do when something fails: docs/deploying.md.
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
    made["restart"] = "no" if runs else "unless-stopped"  # also after the machine was started anew
    if kit.listen:
        port = kit.listen.rpartition(":")[2]
        made["ports"] = [f"{port}:{port}"]
    services.reserve(made, device)
    whole = {"name": f"fl-privacy-{kit.name}", "services": {kit.name: made}}
    return COMPOSE + yaml.safe_dump(whole, sort_keys=False, width=1000)


def _outside(folder: Folder) -> list[tuple[Path, bool]]:
    """Absolute paths that a role needs besides its kit, and whether it writes there; relative ones are in the kit."""
    kit, role = folder.kit, folder.role
    found: list[tuple[Path | None, bool]] = [(kit.data if role.data else None, False)]
    if role.has_node:
        site = folder.own_federation.site(kit.name)
        found = [(kit.data or site.data, False), (kit.policy or site.policy, False)]
    if role.starts_runs:
        found.append((kit.runs, True))
    return [(path, writes) for path, writes in found if path is not None and path.is_absolute()]


def _mount(path: Path, writes: bool) -> dict[str, Any]:
    """At the same place inside; Docker must not make a folder where there is no such path."""
    made = {"type": "bind", "source": str(path), "target": str(path), "bind": {"create_host_path": False}}
    return made if writes else {**made, "read_only": True}


def write(folder: Folder) -> None:
    """The compose file and the unit, anew from kit.yaml; those that somebody has changed stay as they are."""
    keep = kept(folder)
    for path, text in _files(folder).items():
        if path not in keep:
            path.write_text(text)


def kept(folder: Folder) -> list[Path]:
    """The files that are not what would be written, because somebody has changed them."""
    return [path for path, text in _files(folder).items() if path.exists() and _is_anothers(path, text)]


def _files(folder: Folder) -> dict[Path, str]:
    texts = {"compose.yml": compose(folder), f"fl-privacy-{folder.kit.name}.service": unit(folder)}
    return {folder.path / name: MARK.format(digest=_digest(text)) + text for name, text in texts.items()}


def _is_anothers(path: Path, wanted: str) -> bool:
    """Whether it is no longer what its first line says was written, nor what is wanted."""
    text = path.read_text(errors="replace")
    first, _, rest = text.partition("\n")
    return text != wanted and first + "\n" != MARK.format(digest=_digest(rest))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def readme(kit: Kit) -> str:
    where = " and ".join(kit.middleware)
    dialled = f"{kit.hosts[0]}:{kit.listen.rpartition(':')[2]}" if kit.hosts and kit.listen else kit.listen
    facts = {"superlink": kit.superlink, "listen": dialled, "and_middleware": f" and to {where}" if where else ""}
    text = TEXTS[kit.role].format(**facts)
    enrol = ENROL.format(name=kit.name)
    title = kit.name if kit.name.startswith(kit.role) else f"{kit.role} {kit.name}"
    start = f"By systemd: `fl-privacy-{kit.name}.service`; in a container: `compose.yml`; both say how at their top."
    return README.format(start=start, title=title, federation=kit.federation, text=text, enrol=enrol)
