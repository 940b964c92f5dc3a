"""`python -m aggregator_app`: one shard aggregator process."""

from __future__ import annotations

import sys

from fl_privacy.config import Federation
from fl_privacy.deploy import process
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log

from .service import Aggregator


def main() -> int:
    parser = process.middleware_arguments("A shard aggregator of a federation")
    parser.add_argument("--index", type=int, required=True, help="which shard: 0 to aggregators - 1")
    options = parser.parse_args()
    name = f"aggregator-{options.index}"
    log = Log(name)

    def make(federation: Federation) -> Aggregator:
        recorder = process.recorder(options, federation, name)
        return Aggregator(federation, Keyring(options.keys), options.state, log, recorder)

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
