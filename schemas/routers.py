"""A router's registration: its lease, and the models that it owns. The key is the router id, its TTL ``TTL_S``."""

import msgspec

from schemas.wire import decoder

LEASE_S = 0.9  # by the clock of each reader
RENEW_S = 0.25
TTL_S = 1  # of the key: the shortest that NATS has


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One router.

    Attributes:
        since_ns: when it started, or came back after others had to take it for lost. Of two that claim a model, the
            earlier keeps it.
        models: that it owns, as subject tokens.
        shares: of these, whose requests all routers place, because there are too many for one.
        server, connection: id of the server that it is connected to, and of its connection there.
        no_store: it erases requests that are not to be stored; False: an older build.
        private_media: it erases their media, too; False: an older build.
    """

    router: str
    since_ns: int
    models: tuple[str, ...] = ()
    server: str = ""
    connection: int = 0
    shares: tuple[str, ...] = ()
    no_store: bool = False
    private_media: bool = False


decode = decoder(Member)
