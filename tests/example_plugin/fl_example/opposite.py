"""A site that sends the opposite of what it trained."""

from typing import Literal

from pydantic import Field

from fl_privacy.behaviours import Behaviour


class Opposite(Behaviour):
    """Sends -scale * update."""

    kind: Literal["opposite"] = "opposite"
    scale: float = Field(1.0, gt=0)

    def act(self, update, at):
        return -self.scale * update
