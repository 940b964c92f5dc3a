"""Route server, where a round with two equal updates does not count: somebody sent what is not their own."""

from typing import Literal

import numpy as np

from fl_privacy.errors import RoundFailed
from fl_privacy.routes.server import AtServer, ServerRoute


class NoCopies(ServerRoute):
    """As route server; a round in which two sites send the same update is tried again."""

    kind: Literal["no-copies"] = "no-copies"

    def server(self, seat):
        return Checking(seat)


class Checking(AtServer):
    def play(self, ask, model):
        outcome = super().play(ask, model)
        if not ask.farewell and len(np.unique(outcome.rows, axis=0)) < outcome.count:
            raise RoundFailed("two sites sent the same update")
        return outcome
