"""What a kit has besides its config: a systemd unit, a compose file, and a page on what to do with them."""

from __future__ import annotations

from fl_privacy.launch.kit import Kit

HOME = "/srv/fl-privacy"
PROGRAM = "/opt/fl-privacy/bin/fl-privacy"

UNIT = """\
# {home}/{name}: copy the kit there, owned by the user fl-privacy; then
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
KillMode=mixed
TimeoutStopSec=30
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
ReadWritePaths={home}/{name}

[Install]
WantedBy=multi-user.target
"""

COMPOSE = """\
# One container for this kit: chown -R 10001:10001 . && docker compose up -d
name: fl-privacy-{name}
services:
  {name}:
    image: fl-privacy:${{TORCH:-cpu}}
    command: [{command}, /kit]
    init: true
    restart: {restart}
    read_only: true
    tmpfs: [/tmp]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    volumes: ["./:/kit"]
{ports}"""

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
# {role} {name} of federation {federation}

{text}
## Setting up

{enrol}4. Check everything: `fl-privacy preflight .`
5. {start}

Certificates are short-lived. `fl-privacy pki renew .` makes the next request; installing the answer needs no restart.
The whole way, with firewalls, upgrades, backups and what to do when something fails: docs/deploying.md.
"""


def unit(kit: Kit) -> str:
    facts = {"role": kit.role, "name": kit.name, "federation": kit.federation}
    return UNIT.format(**facts, home=HOME, program=PROGRAM)


def compose(kit: Kit) -> str:
    port = kit.listen.rpartition(":")[2] if kit.listen else ""
    runs = kit.role == "server"
    return COMPOSE.format(
        name=kit.name,
        command="train" if runs else "serve",
        restart='"no"' if runs else "on-failure",
        ports=f'    ports: ["{port}:{port}"]\n' if port else "",
    )


def readme(kit: Kit) -> str:
    where = " and ".join(kit.middleware)
    facts = {"superlink": kit.superlink, "listen": kit.listen, "and_middleware": f" and to {where}" if where else ""}
    text = TEXTS[kit.role].format(**facts)
    enrol, start = ENROL.format(name=kit.name), "In a container: `compose.yml`, which says how at its top."
    if kit.role != "server":
        start = (
            f"By systemd: `fl-privacy-{kit.name}.service`; in a container: `compose.yml`; both say how at their top."
        )
    return README.format(start=start, role=kit.role, name=kit.name, federation=kit.federation, text=text, enrol=enrol)
