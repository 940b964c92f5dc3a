"""Whether a kit guards its secrets: who may read and change its files, and what code of a run could do here."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from fl_privacy.config.policy import requires_confinement
from fl_privacy.deploy import confine
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.preflight.checks import exposed
from fl_privacy.deploy.preflight.finding import Check
from fl_privacy.files import mode_of


def modes(folder: Folder) -> Iterator[Check]:
    """Secrets must be their owner's alone; what the owner decides must not be for every user to change."""
    for path in (*folder.keys.folder.glob("*key*.pem"), folder.node_key, folder.path / "secret", folder.state):
        if found := exposed(path):
            yield found
    policy = [folder.policy] if folder.policy else []
    for path in (folder.path, folder.path / "kit.yaml", folder.path / "federation.yaml", *policy):
        if (mode := mode_of(path)) & stat.S_IWOTH:
            yield Check("modes", False, f"{path}: mode {mode:04o} lets every user change it", f"chmod o-w {path}")


def confinement(folder: Folder) -> Iterator[Check]:
    """What holds at a site for code that comes with a run, and what it could still do."""
    if not folder.role.has_node:
        return
    found = confine.means()
    if not found.missing:
        yield Check("confinement", True, f"code of a run is confined: {found.held}")
        return
    required = requires_confinement(folder.own_federation, folder.kit.name)
    detail = f"code of a run could {'; '.join(found.missing)}{'; the policy requires confinement' if required else ''}"
    yield Check("confinement", not required, detail, "use a newer kernel, or a machine for this site alone")
