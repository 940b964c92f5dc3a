"""A site that sends the opposite of what it trained."""

from typing import Literal

from pydantic import Field

from fl_privacy.behaviours import Behaviour


class SignFlip(Behaviour):
    """Sends -scale * update."""

    kind: Literal["sign-flip"] = "sign-flip"
    scale: float = Field(1.0, gt=0)

    def act(self, update, at):
        return -self.scale * update
