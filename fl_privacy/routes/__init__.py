"""The routes by kind: one file each, with both ends, the parties, the cost and the demands."""

from fl_privacy.registry import Registry
from fl_privacy.routes.base import Route

ROUTES: Registry[type[Route]] = Registry(
    "fl_privacy.routes",
    {
        "server": "fl_privacy.routes.server:ServerRoute",
        "shuffler": "fl_privacy.routes.shuffler:ShufflerRoute",
        "shards": "fl_privacy.routes.shards:ShardsRoute",
        "groups": "fl_privacy.routes.groups:GroupsRoute",
        "mixes": "fl_privacy.routes.mixes:MixesRoute",
        "onions": "fl_privacy.routes.onions:OnionsRoute",
        "hierarchical": "fl_privacy.routes.hierarchical:HierarchicalRoute",
        "gossip": "fl_privacy.routes.gossip:GossipRoute",
        "shatter": "fl_privacy.routes.shatter:ShatterRoute",
        "ako": "fl_privacy.routes.ako:AkoRoute",
        "q-dpsgd-1": "fl_privacy.routes.q_dpsgd_1:QDpsgd1Route",
    },
    Route,
)
