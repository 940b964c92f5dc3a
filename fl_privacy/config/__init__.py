"""The federation as YAML: the only source of truth for every process and engine."""

from fl_privacy.config.federation import *  # noqa: F403
