"""What a connection does with errors that the client reports, on a real broker."""

import structlog.testing
from nats.errors import Error as NatsError

from infra.broker.server import EmbeddedNats
from schemas.subjects import Subjects
from tests.infra.bus.support import opened


async def test_errors_of_one_kind_are_one_line_in_the_log(broker: EmbeddedNats, subjects: Subjects) -> None:
    """A client whose reply subject a gateway may not publish to would fill the log: one line for each message."""
    async with opened(broker, subjects) as bus:
        with structlog.testing.capture_logs() as logs:
            for number in range(50):
                await bus._on_error(NatsError(f'permissions violation for publish to "_inbox.{number}"'))
                await bus._on_error(NatsError(f'permissions violation for subscription to "_inbox.{number}"'))
        assert [entry["event"] for entry in logs] == ["bus_error"] * 2
        assert "_inbox.0" in logs[0]["error"]
