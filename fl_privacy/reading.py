"""Read YAML into pydantic models; every error is one line with field, value, reason and fix, in our own words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fl_privacy.errors import ConfigError

NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"  # of federations, sites and audits
ADDRESS = r"^(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?):[0-9]{1,5}$"
DEVICE = r"^(cpu|cuda(:\d{1,2})?)$"
DIGEST = r"^[0-9a-f]{64}$"
PROXY = r"^http://[A-Za-z0-9.-]+:[0-9]{1,5}$"
PATTERNS = {
    NAME: "use at most 63 lower-case letters, digits and hyphens",
    ADDRESS: "use host:port, such as fl.example.org:9092",
    DEVICE: "use cpu, cuda or cuda:N",
    DIGEST: "use the 64 digits of a SHA-256",
    PROXY: "use http://host:port, without a password",
}
_NUMBER, _WHOLE, _LIST, _TRUTH = "use a number", "use a whole number", "use a list", "use true or false"
_KEYS = ("dict_type", "model_type", "model_attributes_type")
# By pydantic's name of the error; its own words are about Python.
REASONS = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "use a finite number",
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "string_type": "use text; put it in quotes",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "has more than {max_length} entries",
    "too_short": "has fewer than {min_length} entries",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "set_type": _LIST,
    "path_type": "use a path",
}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
DEEPEST = 50  # level of YAML
MOST_VALUES = 1_000_000  # with aliases written out
MOST = 8  # problems in one message
LONGEST = 60  # characters of a value

M = TypeVar("M", bound=BaseModel)


def text_of(path: str | Path, what: str = "config") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = _near(Path(path)) if isinstance(error, OSError) else "; save it as UTF-8"
        reason = f"({getattr(error, 'strerror', None) or error}){near}"
        raise ConfigError(f"{what} {path}: cannot be read {reason}") from None


def _near(path: Path) -> str:
    close = get_close_matches(path.stem, [file.stem for file in path.parent.glob(f"*{path.suffix}")], 1)
    return f"; did you mean {close[0]}{path.suffix}?" if close else "; check the path"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key; where the `kind` or the data set changes, nothing that belongs to it stays."""
    made = dict(below)
    for key, value in above.items():
        old = made.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, old.get("kind")):
            same = value.get("dataset", old.get("dataset")) == old.get("dataset")
            made[key] = merged({k: v for k, v in old.items() if same or k != "options"}, value)
        else:
            made[key] = value
    return made


def mapping(text: str, source: str, page: str = "docs/config.md") -> dict[str, Any]:
    """Parse YAML text that must be a mapping; `page` documents its keys."""
    try:
        _check_depth(text, source)
        values = yaml.load(text, Loader=LOADER)
    except yaml.YAMLError as error:
        reason = re.sub(r"\s+", " ", str(error)).replace(' in "<unicode string>",', " at")
        raise ConfigError(f"{source}: not YAML: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected keys and values, got {type(values).__name__}; see {page}")
    return values


def _check_depth(text: str, source: str) -> None:
    """Loaders recurse, and libyaml's without a limit of its own; aliases of aliases grow when they are written out."""
    sizes = dict[str, int]()  # of anchors, in values
    above: list[tuple[str | None, int]] = []  # of the collections around: their anchor, and values before them
    count = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            sizes |= {} if anchor is None else {anchor: count - before}
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.AliasEvent) and any(event.anchor == anchor for anchor, _ in above):
                raise ConfigError(f"{source}: not YAML of ours: {event.anchor!r} contains itself")
            count += sizes.get(event.anchor or "", 1) if isinstance(event, yaml.AliasEvent) else 1
            if isinstance(event, yaml.CollectionStartEvent):
                above.append((event.anchor, count - 1))
        if len(above) > DEEPEST:
            raise ConfigError(f"{source}: not YAML of ours: it has more than {DEEPEST} levels")
        if count > MOST_VALUES:
            raise ConfigError(f"{source}: not YAML of ours: it has more than {MOST_VALUES:,} values")


def validated(model: type[M], values: dict[str, Any], source: str, extra: Literal["forbid"] | None = None) -> M:
    """`extra`: what becomes of unknown keys; default: as the model says."""
    try:
        return model.model_validate(values, extra=extra)
    except ValidationError as error:
        raise ConfigError(f"{source}: {problems(error, model)}") from None


def problems(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong, on one line: every field once, with all that it could have been."""
    found: dict[str, list[str]] = {}
    for one in error.errors():
        found.setdefault(_given(one), []).append(_reason(one, model))
    lines = [
        where + " or ".join(dict.fromkeys(reasons)).replace(" or use ", " or ") for where, reasons in found.items()
    ]
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "; ".join([*lines[:MOST], *more])


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _given(error: Any) -> str:
    """The field and what it was given; the members of a union are no part of the field."""
    parts = [str(part) for part in error["loc"] if isinstance(part, int) or re.fullmatch(r"\w+", str(part))]
    value, context = error.get("input"), error.get("ctx", {})
    if error["type"] == "kind" and "given" in context:
        parts, value = [*parts, "kind"], context["given"]
    field = ".".join(parts)
    if str(error["msg"]).startswith(f"Value error, {field}."):
        return ""  # the reason names the field itself
    if error["type"] in ("extra_forbidden", "missing"):
        return f"{field}: "
    shown = repr(value)
    shown = shown if len(shown) <= LONGEST else shown[: LONGEST - 3] + "..."
    return f"{field}: {shown} was given: " if field else ""


def _reason(error: Any, model: type[BaseModel]) -> str:
    name, context = str(error["type"]), dict(error.get("ctx", {}))
    if name == "extra_forbidden":
        *above, key = error["loc"]
        return f"unknown key{nearest(str(key), _fields(model, above)) or '; remove it or check its spelling'}"
    if name == "missing":
        return "missing; add it"
    if name == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return PATTERNS[context["pattern"]]
    if name == "literal_error":
        near = nearest(str(error.get("input")), re.findall(r"'([^']*)'", context["expected"]))
        return f"use {context['expected'].replace(chr(39), '')}{near}"
    if name in _KEYS:
        fields = _fields(model, error["loc"])
        first = next((name for name, field in fields.items() if field.is_required()), next(iter(fields), "key"))
        return f"use keys and values, such as {{{first}: ...}}"
    if name in REASONS:
        return REASONS[name].format_map(_plain(context))
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}" if error["loc"] else message


def _plain(context: Mapping[str, Any]) -> dict[str, Any]:
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}


def _fields(model: type[BaseModel], above: Iterable[Any]) -> dict[str, FieldInfo]:
    """The keys that a model has at a place below it; none where a choice decides."""
    for part in above:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return {}
        model = inner
    return model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field: itself, or that of an optional or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
