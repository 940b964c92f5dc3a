"""A file that all parties agree on by its SHA-256, although only some of them have it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from fl_privacy.choices import Model
from fl_privacy.errors import ConfigError


class Pinned(Model):
    """`FILE` in a config stands for the file as it is when the config is read."""

    file: Path
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="before")
    @classmethod
    def _pin(cls, value: Any) -> Any:
        fields = {"file": value} if isinstance(value, str | Path) else value
        if not isinstance(fields, dict) or not isinstance(fields.get("file"), str | Path) or "sha256" in fields:
            return fields
        try:
            return {**fields, "sha256": _digest(Path(fields["file"]))}
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror or error})") from None

    @classmethod
    def of(cls, path: Path, field: str) -> Pinned:
        """Pin a file now; `field` is what an error is about."""
        try:
            return cls(file=path.absolute(), sha256=_digest(path))
        except OSError as error:
            raise ConfigError(f"{field}: {path} cannot be read ({error.strerror or error})") from None

    def check(self, field: str) -> Path:
        """The file, if it is the pinned one."""
        found = self.of(self.file, field)
        if found.sha256 != self.sha256:
            digests = f"SHA-256 {found.sha256[:12]}..., but the federation agreed on {self.sha256[:12]}..."
            raise ConfigError(f"{field}: {self.file} has {digests}; use that file")
        return found.file

    def placed(self, folder: Path, field: str) -> Pinned:
        """The same file in a folder of ours, under the name of its field."""
        target = folder / f"{field}{self.file.suffix}"
        if not target.is_file() or _digest(target) != self.sha256:
            shutil.copyfile(self.check(field), target)
        return Pinned(file=target, sha256=self.sha256)


def beside(values: Mapping[str, Any], folder: Path, *fields: str) -> dict[str, Any]:
    """A config's values, with relative paths of these fields taken from the config's own folder."""
    found = dict(values)
    for field in fields:
        value = found.get(field)
        if isinstance(value, str):
            found[field] = str(folder / value)
        elif isinstance(value, dict) and isinstance(value.get("file"), str):
            found[field] = {**value, "file": str(folder / value["file"])}
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
