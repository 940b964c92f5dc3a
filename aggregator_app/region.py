"""`python -m aggregator_app.region`: the aggregator of one region, as a process."""

from __future__ import annotations

import sys

from fl_privacy.config import Federation
from fl_privacy.deploy import process
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log

from .summing import Region


def main() -> int:
    parser = process.middleware_arguments("The aggregator of a region of a federation")
    parser.add_argument("--index", type=int, required=True, help="which region: 0 to regions - 1")
    options = parser.parse_args()
    name = f"region-{options.index}"
    log = Log(name)

    def make(federation: Federation) -> Region:
        recorder = process.recorder(options, federation, name)
        return Region(name, federation, Keyring(options.keys), options.state, log, recorder)

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
