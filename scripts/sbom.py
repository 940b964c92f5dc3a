"""A software bill of materials in CycloneDX JSON: every distribution with version, licence and SHA-256."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from email.message import Message
from typing import Any

from wheelhouse import Wheel, metadata

Component = dict[str, Any]
LONGEST_NAME = 80  # a longer licence field is the licence's text


def licence(found: Message) -> dict[str, Any]:
    """What a distribution says its licence is: an SPDX expression, a name, or its classifiers."""
    expression = found.get("License-Expression")
    if expression:
        return {"expression": expression}
    named = (found.get("License") or "").strip()
    if named and named != "UNKNOWN" and "\n" not in named and len(named) <= LONGEST_NAME:
        return {"license": {"name": named}}
    classifiers = (text.split(" :: ") for text in found.get_all("Classifier") or [])
    names = [parts[-1] for parts in classifiers if parts[0] == "License" and len(parts) > 2]
    return {"license": {"name": " AND ".join(names) or "NOASSERTION"}}


def wheel_component(wheel: Wheel) -> Component:
    found = metadata(wheel.path)
    address = f"pkg:pypi/{wheel.name}@{wheel.version}"
    return {
        "type": "library",
        "bom-ref": address,
        "name": wheel.name,
        "version": wheel.version,
        "purl": address,
        "licenses": [licence(found)],
        "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
    }


def debian_component(name: str, version: str) -> Component:
    """A package of the image's base system."""
    address = f"pkg:deb/debian/{name}@{version}"
    return {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}


def bill(project: Wheel, wheels: Iterable[Wheel], debian: Iterable[tuple[str, str]] = ()) -> str:
    """The bill of a project with its wheels and its image's system packages; the same input gives the same bytes."""
    components = [wheel_component(wheel) for wheel in wheels] + [debian_component(*package) for package in debian]
    components.sort(key=lambda component: str(component["purl"]))
    subject = {**wheel_component(project), "type": "application"}
    content = json.dumps([subject, components], sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"
