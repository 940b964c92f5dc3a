"""Sites that misbehave on purpose, so that an audit can measure what a defence does about them."""

from fl_privacy.behaviours.base import Behaviour, Scene
from fl_privacy.registry import Registry

_HERE = "fl_privacy.behaviours"
BEHAVIOURS: Registry[type[Behaviour]] = Registry(
    _HERE,
    {
        "label-flip": f"{_HERE}.records:LabelFlip",
        "backdoor": f"{_HERE}.records:Backdoor",
        "noise": f"{_HERE}.updates:Noise",
        "scaling": f"{_HERE}.updates:Scaling",
        "sign-flip": f"{_HERE}.updates:SignFlip",
        "little": f"{_HERE}.together:Little",
        "inner-product": f"{_HERE}.together:InnerProduct",
        "inside": f"{_HERE}.clusters:Inside",
        "lying-sample": f"{_HERE}.clusters:LyingSample",
        "tampered-rule": f"{_HERE}.permuted:TamperedRule",
    },
    Behaviour,
)

__all__ = ["BEHAVIOURS", "Behaviour", "Scene"]
