"""What a config and `attack` can choose from, and which package it comes from."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table

from fl_privacy.registry import Registry, resolve

from .common import Json, app, out, say

REGISTRIES = (
    "fl_privacy.tasks.task:TASKS",
    "fl_privacy.tasks.dataset:DATASETS",
    "fl_privacy.steps:STEPS",
    "fl_privacy.routes:ROUTES",
    "fl_privacy.combine.rules:RULES",
    "fl_privacy.behaviours:BEHAVIOURS",
    "attacks.common.attack:ATTACKS",
)


@app.command()
def plugins(as_json: Json = False) -> None:
    """List the tasks, steps, routes, rules, behaviours and attacks, ours and those of installed packages."""
    registries: list[Registry[object]] = [resolve(target) for target in REGISTRIES]
    found = [plugin for registry in registries for plugin in registry.plugins()]
    if as_json:
        print(json.dumps({"plugins": [asdict(plugin) for plugin in found]}))
        return
    table = Table(*("group", "name", "package", "target"), title="what is installed")
    for plugin in found:
        table.add_row(plugin.group, plugin.name, f"{plugin.package} {plugin.version}", plugin.target)
    out.print(table)
    for plugin in found:
        if plugin.problem:
            say(f"cannot be used: {plugin.group} {plugin.name}: {plugin.problem}")
