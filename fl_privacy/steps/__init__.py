"""The steps by slot and kind. Entry points of the group `fl_privacy.steps` are named `slot.kind`."""

from fl_privacy.registry import Registry
from fl_privacy.steps.base import SLOTS, Step

HERE = "fl_privacy.steps."
OFF = {f"{slot}.none": HERE + "base:Off" for slot in SLOTS}
PRIVATISE = {"privatise.ldp": HERE + "privatise.ldp:Ldp", "privatise.dpsgd": HERE + "privatise.dpsgd:Dpsgd"}
STEPS: Registry[type[Step]] = Registry("fl_privacy.steps", OFF | PRIVATISE)
