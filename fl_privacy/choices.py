"""A choice in a federation's YAML: `{kind: NAME, ...}`, checked by the model that the name stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fl_privacy.reading import nearest
from fl_privacy.registry import Registry

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class Model(BaseModel):
    """Strict by default: an unknown key is an error, and a config is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Choice(Model):
    """One way of doing a step, a route or a rule. Its fields are what a user may set."""

    kind: str

    def problems(self, federation: Federation) -> Iterator[str]:
        """What this choice demands of the rest of the federation and does not find: field, value and fix."""
        yield from ()


class Chosen:
    """Annotation of a config field that holds one of a registry's choices, also one that a plug-in adds later."""

    def __init__(self, registry: Registry[Any], slot: str = "") -> None:
        self._registry, self._slot = registry, slot

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # The union is for the JSON schema alone: values are checked by `_parse`, which knows of plug-ins too.
        ours = tuple(self._registry.get(name) for name in self._registry.ours(self._slot))
        union: Any = Annotated[Union[ours], Field(discriminator="kind")] if ours[1:] else (ours or (Choice,))[0]  # noqa: UP007
        known = handler.generate_schema(union)
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: self._parse(value, source),
            known,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

    def _parse(self, value: Any, base: Any) -> Any:
        if isinstance(value, Choice):
            return value
        names = [name.removeprefix(self._slot) for name in self._registry if name.startswith(self._slot)]
        listed = {"names": ", ".join(names) or "those of an installed plug-in (there is none)"}
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise PydanticCustomError("kind", "write {form}, with one of {names}", {**listed, "form": "{kind: NAME}"})
        name = self._slot + value["kind"]
        if name not in self._registry:
            facts = {**listed, "given": value["kind"], "near": nearest(value["kind"], names)}
            raise PydanticCustomError("kind", "unknown; use one of {names}{near}", facts)
        kind = self._registry.get(name)
        if not issubclass(kind, base):
            raise PydanticCustomError("kind", "is not a {base}, which this key needs", {"base": base.__name__})
        return kind.model_validate(value)


def _dump(choice: Choice, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return choice.model_dump(mode=info.mode)
