"""The federation as YAML: the only source of truth for every process and engine."""

from fl_privacy.choices import Model
from fl_privacy.config.federation import Address, Federation, Hosts, Site, schema
from fl_privacy.config.pinned import Pinned
from fl_privacy.config.stop import Stop
from fl_privacy.config.task import Partition, Task, Training
from fl_privacy.reading import NAME
from fl_privacy.routes.server import ServerRoute
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.routes.shuffler import ShufflerRoute
from fl_privacy.steps.privatise.ldp import Ldp

__all__ = ["NAME", "Address", "Federation", "Hosts", "Model", "Partition", "Pinned", "Site", "Stop", "Task", "Training"]
__all__ += ["Ldp", "ServerRoute", "ShardsRoute", "ShufflerRoute", "schema"]
