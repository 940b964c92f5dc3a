"""Updates as float16: half the bytes. What rounding takes away is added to the next update."""

from typing import Literal

import numpy as np

from fl_privacy.coding import Coding
from fl_privacy.steps.base import Running, Step

LARGEST = np.finfo(np.float16).max


class Float16(Step):
    """Rounds updates to float16, with error feedback."""

    kind: Literal["float16"] = "float16"

    def coding(self, before):
        return Coding("float16", "<f2", before.per_parameter)

    def start(self, seat):
        return Rounding()


class Rounding(Running):
    def outward(self, update, at):
        wanted = update + self.error
        sent = wanted.clip(-LARGEST, LARGEST).astype("<f2")
        self.error = wanted - sent
        return sent

    def state(self):
        return {"error": self.error}

    def restore(self, state):
        self.error = state.get("error", np.float32(0))
