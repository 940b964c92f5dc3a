"""Generate docs/config.schema.json and docs/config.md from the config models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fl_privacy.config import schema

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """# Configuration reference

A federation is one YAML file. Only `sites` is required. Unknown keys and unsupported combinations are errors that name
the field, the value, the reason and the fix. `make schema` generates this page and
[config.schema.json](config.schema.json) from the code; editors that support JSON Schema use the latter to check and
complete a config as you type.

```yaml
{example}```
"""
EXAMPLE = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def page() -> str:
    """The reference page: one table per model."""
    made = schema()
    parts = [HEAD.format(example=EXAMPLE.read_text()), *_section("Federation", made, made)]
    for name, model in made["$defs"].items():
        parts += _section(name, model, made)
    return "\n".join(parts)


def _section(name: str, model: dict[str, Any], root: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {name}\n\n{model.get('description', '')}\n"
    yield "| key | type | default | description |\n|---|---|---|---|"
    for key, field in model["properties"].items():
        default = "required" if key in model.get("required", ()) else f"`{json.dumps(_default(field))}`"
        if key == "kind" and "const" in field:
            default = f"`{field['const']}`"
        yield f"| `{key}` | {_takes(field)} | {default} | {field.get('description', '')} |"


def _default(field: dict[str, Any]) -> Any:
    default = field.get("default")
    return default.get("kind", {}) if isinstance(default, dict) else default


def _takes(field: dict[str, Any]) -> str:
    """A field's type and limits in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(_takes(option) for option in field[union])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_takes(field.get('items', {}))}"
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    words = [f"{word} {field[limit]:g}" for limit, word in limits.items() if limit in field]
    return ", ".join([field.get("type", "any"), *words])


def schema_text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    (DOCS / "config.schema.json").write_text(schema_text())
    (DOCS / "config.md").write_text(page())
