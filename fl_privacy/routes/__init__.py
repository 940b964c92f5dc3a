"""The routes by kind: one file each, with both ends, the parties, the cost and the demands."""

from fl_privacy.registry import Registry
from fl_privacy.routes.base import Route

KINDS = ("server", "shuffler", "shards")
OURS = {kind: f"fl_privacy.routes.{kind}:{kind.title()}Route" for kind in KINDS}
ROUTES: Registry[type[Route]] = Registry("fl_privacy.routes", OURS)
