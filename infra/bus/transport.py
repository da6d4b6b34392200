"""The stream of bytes to a broker, over TCP or TLS: nats-py's, with what TLS lacks there.

The scheme ``tls`` asks for TLS; a server that requires TLS gets it whatever the scheme is. Certificates are verified
against the system's authorities, those in the file that ``SSL_CERT_FILE`` names, or ``PENSTOCK_NATS_CA``
(``connection.authenticate``).
"""

import asyncio
import ssl
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

CLOSED_S = 1.0


class LinkTransport(TcpTransport):  # type: ignore[misc]  # untyped
    def __bool__(self) -> bool:
        return True  # nats-py replaces one that is not connected by its own

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        reader, writer = self._io_reader, self._io_writer
        reader.set_transport(writer.transport)  # without it, nothing can pause reading, and the buffer has no limit
        writer._protocol._over_ssl = True  # as of any stream over TLS: asyncio warns otherwise when it is closed

    def peer_certificate(self) -> bytes:
        """The server's certificate, DER; empty without TLS."""
        link = self._io_writer.get_extra_info("ssl_object") if self._io_writer is not None else None
        return (link.getpeercert(binary_form=True) or b"") if link is not None else b""

    async def wait_closed(self) -> None:
        """nats-py waits for this before it connects again, and a server that hangs answers no goodbye of TLS."""
        if self._io_writer is None:
            return
        closed: asyncio.Future[None] = self._io_writer._protocol._get_close_waiter(self._io_writer)
        await asyncio.wait([closed], timeout=CLOSED_S)  # which cancels nothing: others may wait for the same end
        if not closed.done():
            self._io_writer.transport.abort()
        elif not closed.cancelled():
            closed.exception()  # the link was broken: that is why it is closed
