"""What a kit has besides its config: a systemd unit, a compose file, and a README on how to use them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from fl_privacy.addresses import port_of, show
from fl_privacy.config.policy import shared_ledger
from fl_privacy.deploy.engines import compose as services
from fl_privacy.deploy.kits.kit import Folder, Kit
from fl_privacy.roles import ROLES

TEMPLATES = Path(__file__).parent / "templates"
HOME = "/srv/fl-privacy"
PROGRAM = "/opt/fl-privacy/bin/fl-privacy"
HOMES = ("/home/", "/root/")
MARK = "# Written by fl-privacy ({digest}); once you change this file, it is left alone.\n"

COMPOSE = """\
# One container for this kit: chown -R 10001:10001 . && docker compose up -d
# Mounts and devices are those in kit.yaml; after a change there, run fl-privacy refresh .
"""

BACKUP = "- Back up {paths} between runs, and the keys.\n"


def unit(folder: Folder) -> str:
    kit = folder.kit
    paths = [path for path, _ in _outside(folder)]
    common = _template("hardening.service").format(
        see_home="read-only" if any(str(path).startswith(HOMES) for path in paths) else "yes",
        writes=" ".join([f"{HOME}/{kit.name}", *(str(path) for path, writes in _outside(folder) if writes)]),
    )
    facts = {"role": kit.role, "name": kit.name, "federation": kit.federation, "common": common}
    template = _template("train.service" if folder.role.starts_runs else "serve.service")
    return template.format(**facts, home=HOME, program=PROGRAM)


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
        found = [(kit.data or site.data, False), (site.policy and site.policy.resolve(), False)]
        found.append((shared_ledger(site.policy), True))
    if role.starts_runs:
        found.append((kit.runs, True))
    outside = [(path, writes) for path, writes in found if path is not None and path.is_absolute()]
    return [(path, writes) for path, writes in outside if not path.is_relative_to(folder.path)]


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
    own = f"{kit.role}.md" if (TEMPLATES / f"{kit.role}.md").exists() else "other.md"
    text, backup = _template(own).format(**facts), ROLES[kit.role].backup
    text += BACKUP.format(paths=" and ".join(f"`{path}`" for path in backup)) if backup else ""
    title = kit.name if kit.name.startswith(kit.role) else f"{kit.role} {kit.name}"
    return _template("README.md").format(title=title, name=kit.name, federation=kit.federation, text=text)


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
