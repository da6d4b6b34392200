"""The deployment behind an endpoint: from ``deployment.json`` beside its results and from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

FILE = "deployment.json"
_Count = Annotated[int, Meta(ge=0)]


class BadDeployment(ValueError):
    """A description that cannot be used; the text names the file or the flag."""


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Attributes:
        kind: deployments of one kind share a line, such as "aggregated"; "": the endpoint's name.
        model: "": the sweep's.
        total_gpus: that it uses; 0: as the sweep says.
        gpu: its type, as the price file calls it; "": unknown.
        workers: aggregated workers, which prefill and decode; 0: none, or unknown.
        settings: further differences from other deployments, such as a batch size.
    """

    kind: str = ""
    model: str = ""
    total_gpus: _Count = 0
    gpu: str = ""
    workers: _Count = 0
    prefill_workers: _Count = 0
    decode_workers: _Count = 0
    settings: dict[str, str | int | float | bool] = {}


_FIELDS = tuple(field for field in Deployment.__struct_fields__ if field != "settings")


def find(folder: Path) -> Deployment:
    """Read the description in the endpoint's folder or the one above it. Without either it is empty.

    Raises:
        BadDeployment: the file is damaged.
    """
    for path in (folder / FILE, folder.parent / FILE):
        try:
            return msgspec.json.decode(path.read_bytes(), type=Deployment)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise BadDeployment(f"{path}: {error}") from None
    return Deployment()


def parse(flags: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse the fields that flags give, by endpoint.

    Args:
        flags: each ``NAME:FIELD=VALUE,…``; a field that no deployment has becomes one of its settings.

    Raises:
        BadDeployment: a flag has another form.
    """
    values: dict[str, dict[str, str]] = {}
    for flag in flags:
        name, colon, path = flag.rpartition(":")
        pairs = [pair.partition("=") for pair in path.split(",")]
        if not colon or not name or not all(key and equals and value for key, equals, value in pairs):
            raise BadDeployment(f"--deployment {flag}: expected NAME:FIELD=VALUE,… such as pd:kind=disaggregated")
        values.setdefault(name, {}).update((key, value) for key, _, value in pairs)
    return values


def override(deployment: Deployment, fields: dict[str, str]) -> Deployment:
    """Return the deployment with ``fields`` replaced.

    Raises:
        BadDeployment: a number is none, or negative.
    """
    own = {key: value for key, value in fields.items() if key in _FIELDS}
    other = {key: value for key, value in fields.items() if key not in _FIELDS}
    merged = msgspec.structs.asdict(deployment) | own | {"settings": deployment.settings | other}
    try:
        return msgspec.convert(merged, Deployment, strict=False)
    except msgspec.ValidationError as error:
        raise BadDeployment(f"--deployment: {error}") from None
