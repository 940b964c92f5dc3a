"""The steps by slot and kind. Entry points of the group `fl_privacy.steps` are named `slot.kind`."""

from fl_privacy.registry import Registry
from fl_privacy.steps.base import SLOTS, Step

STEPS: Registry[type[Step]] = Registry(
    "fl_privacy.steps",
    {
        **{f"{slot}.none": "fl_privacy.steps.base:Off" for slot in SLOTS},
        "privatise.ldp": "fl_privacy.steps.privatise.ldp:Ldp",
        "privatise.dpsgd": "fl_privacy.steps.privatise.dpsgd:Dpsgd",
        "permute.tazza": "fl_privacy.steps.permute.shuffled:Tazza",
        "permute.tazza-published": "fl_privacy.steps.permute.shuffled:TazzaPublished",
        "compress.dsc": "fl_privacy.steps.compress.dsc:Dsc",
        "compress.dsc-mean": "fl_privacy.steps.compress.dsc:DscMean",
        "compress.prune": "fl_privacy.steps.compress.prune:Prune",
        "compress.top-k": "fl_privacy.steps.compress.topk:TopK",
        "compress.random-k": "fl_privacy.steps.compress.randomk:RandomK",
        "compress.qsgd": "fl_privacy.steps.compress.qsgd:Qsgd",
        "compress.uniform": "fl_privacy.steps.compress.uniform:Uniform",
        "compress.priprune": "fl_privacy.steps.compress.priprune:PriPrune",
        "compress.soteriafl": "fl_privacy.steps.compress.soteriafl:SoteriaFL",
        "encode.rns": "fl_privacy.steps.encode.rns:Rns",
        "encode.fixed": "fl_privacy.steps.encode.fixed:Fixed",
    },
    Step,
)
