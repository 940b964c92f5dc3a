"""Read YAML into pydantic models; every error is one line with field, value, reason and fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from fl_privacy.errors import ConfigError

NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"  # of federations, sites and audits

M = TypeVar("M", bound=BaseModel)


def text_of(path: str | Path, what: str = "config") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def mapping(text: str, source: str, page: str = "docs/config.md") -> dict[str, Any]:
    """Parse YAML text that must be a mapping; `page` documents its keys."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise ConfigError(f"{source}: not YAML: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected keys and values, got {type(values).__name__}; see {page}")
    return values


def validated(model: type[M], values: dict[str, Any], source: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_line(e, model.__name__.lower()) for e in error.errors())) from None


def _line(error: Any, root: str) -> str:
    """One pydantic error as field, value and reason."""
    field = ".".join(str(part) for part in error["loc"]) or root
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown key; remove it or check its spelling"
    if error["type"] == "missing":
        return f"{field}: missing; add it"
    if not error["loc"]:
        return message
    value = repr(error.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{field}: {shown} was given: {message[:1].lower()}{message[1:]}"
