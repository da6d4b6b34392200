"""The interface of connectors, and the one that changes nothing."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from penstock.schemas.plans import Role


class ConnectorFailed(Exception):
    """Workers could not be counted or changed; the text says why."""


class Connector(Protocol):
    """Used by one planner at a time."""

    name: ClassVar[str]

    async def counts(self) -> dict[Role, int]:
        """Workers that there are to be, by role: running, starting or asked for. Empty: only the fleet knows.

        Raises:
            ConnectorFailed
        """

    async def apply(self, targets: Mapping[Role, int]) -> None:
        """Ask for so many workers. Those that leave finish what they run.

        Raises:
            ConnectorFailed
        """


class DryRun:
    """Decisions are logged and nothing else."""

    name: ClassVar[str] = "dry-run"

    async def counts(self) -> dict[Role, int]:
        return {}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        pass
