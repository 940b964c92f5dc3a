"""`python -m shuffler_app.mix`: one mix process."""

from __future__ import annotations

import sys

from fl_privacy.config import Federation
from fl_privacy.deploy import process
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.routes.base import only
from fl_privacy.routes.mixes import ByMixes

from . import checked, onions
from .adding import Mix


def _kind(federation: Federation) -> type[Mix]:
    kinds: dict[str, type[Mix]] = {"adding": Mix, "signing": checked.CheckedMix, "onions": onions.OnionMix}
    return kinds[only(federation.route, ByMixes, "mixes").service]  # type: ignore[type-abstract]


def main() -> int:
    parser = process.middleware_arguments("A mix of a federation")
    parser.add_argument("--index", type=int, required=True, help="which mix: 0 to mixes - 1")
    options = parser.parse_args()
    name = f"mix-{options.index}"
    log = Log(name)

    def make(federation: Federation) -> Mix:
        recorder = process.recorder(options, federation, name)
        return _kind(federation)(name, federation, Keyring(options.keys), options.state, log, recorder)

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
