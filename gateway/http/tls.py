"""The certificate that the gateway shows, loaded again when its files change. Open connections keep theirs."""

import asyncio
import contextlib
import os
import ssl

import structlog

log = structlog.get_logger("gateway")

LOOK_S = 2.0
HANDSHAKE_S = 10.0

_Stamp = tuple[tuple[int, ...], ...]


class BadCertificate(Exception):
    """The files cannot be used; the text says why."""


class Certificate:
    """
    Args:
        cert: PEM file with the certificate and its chain.
        key: PEM file with its private key, without a password.
    Raises:
        BadCertificate: the files cannot be used.

    Attributes:
        context: of the server's sockets; new handshakes use what was loaded last.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._stamp = self._stamped()
        self.context = self._loaded()

    async def watch(self) -> None:
        """Load the files again whenever they have changed. A pair that does not fit is tried again when it changes."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.reload()

    def reload(self) -> bool:
        """Load the files if they have changed; returns whether they were loaded."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._loaded()  # in a context of its own: the files may be half replaced
            self.context.load_cert_chain(self._cert, self._key, _no_password)
        except (BadCertificate, OSError) as error:
            log.warning("certificate_not_loaded", error=str(error), effect="the last one stays in use")
            return False
        log.info("certificate_loaded", file=self._cert)
        return True

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert, self._key, _no_password)
        except ssl.SSLError as error:
            what = "they do not belong together" if "MISMATCH" in str(error) else error.reason or str(error)
            raise BadCertificate(f"--tls-cert {self._cert}, --tls-key {self._key}: {what}; give PEM files") from None
        except (OSError, ValueError) as error:
            raise BadCertificate(f"--tls-cert {self._cert}, --tls-key {self._key}: {error}") from None
        return context

    def _stamped(self) -> _Stamp:
        """What differs when a file is replaced, written or made readable, through links as Kubernetes makes them."""
        stamps = []
        for path in (self._cert, self._key):
            with contextlib.suppress(OSError):
                at = os.stat(path)
                stamps.append((at.st_mtime_ns, at.st_ctime_ns, at.st_size, at.st_ino))
        return tuple(stamps)


def _no_password() -> str:
    """Called for an encrypted key, where OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted; give one without a password")
