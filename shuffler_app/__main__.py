"""`python -m shuffler_app`: one shuffler process."""

from __future__ import annotations

import sys

from fl_privacy.config import Federation
from fl_privacy.deploy import process
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log

from .service import Shuffler


def main() -> int:
    options = process.middleware_arguments("The shuffler of a federation").parse_args()
    log = Log("shuffler")

    def make(federation: Federation) -> Shuffler:
        recorder = process.recorder(options, federation, "shuffler")
        return Shuffler(federation, Keyring(options.keys), options.state, log, recorder)

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
