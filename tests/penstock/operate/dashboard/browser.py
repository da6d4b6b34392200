"""Headless Chromium over its DevTools protocol, on a pipe.

https://chromedevtools.github.io/devtools-protocol/
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_TO_BROWSER, _FROM_BROWSER = 3, 4  # file descriptors that --remote-debugging-pipe reads and writes


class Page:
    """One open page."""

    def __init__(self, reader: asyncio.StreamReader, writer: Callable[[bytes], object]) -> None:
        self._reader = reader
        self._write = writer
        self._number = 0
        self._session = ""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are dropped."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    async def open(self, url: str) -> None:
        target = await self.call("Target.createTarget", url=url)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return (await self.call("Runtime.evaluate", expression=expression))["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(40):
            while not await self.evaluate(expression):  # noqa: ASYNC110 - the far end is another process
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncGenerator[Page, None]:
    """A browser that shows ``url``; its profile is in ``folder``."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def descriptors() -> None:
        os.dup2(to_read, 10)
        os.dup2(from_write, 11)
        os.dup2(10, _TO_BROWSER)
        os.dup2(11, _FROM_BROWSER)

    browser = await asyncio.create_subprocess_exec(
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
        f"--user-data-dir={folder}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(_TO_BROWSER, _FROM_BROWSER),
        preexec_fn=descriptors,
    )
    os.close(to_read)
    os.close(from_write)
    reader = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb")
    )
    try:
        page = Page(reader, lambda data: os.write(to_write, data))
        await page.open(url)
        yield page
    finally:
        os.close(to_write)
        with contextlib.suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
        transport.close()
