"""Certificates of this machine, and a broker that speaks TLS only."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from penstock.infra.nats_server.server import EmbeddedNats

DAYS = 2  # for which certificates are valid
Pair = tuple[Path, Path]  # files of a certificate and its key


def issue(folder: Path, name: str) -> Pair:
    """Certificate and key of 127.0.0.1; the certificate is its own authority."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", str(DAYS), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


class TlsNats(EmbeddedNats):
    """Args: pair: files of its certificate and key."""

    def __init__(self, folder: Path, *args: Any, pair: Pair, **options: Any) -> None:
        super().__init__(folder, *args, **options)
        self._cert, self._key = pair

    def url(self, role: str = "operator") -> str:
        return super().url(role).replace("nats://", "tls://", 1)

    def _render(self) -> str:
        return f'{super()._render()}\ntls {{ cert_file: "{self._cert}", key_file: "{self._key}" }}\n'

    async def _problem(self) -> str | None:
        """It says hello; whether JetStream answers is not asked over TLS."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                hello = await asyncio.wait_for(reader.readline(), 2.0)
            finally:
                writer.close()
        except (OSError, TimeoutError) as error:
            return repr(error)
        return None if hello.startswith(b"INFO") else "no INFO"


def issue_authority(folder: Path) -> None:
    """``ca.crt`` and ``ca.key``, which sign the certificates of others."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", str(DAYS), "-subj", "/CN=penstock-ca", "-keyout", folder / "ca.key", "-out", folder / "ca.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
