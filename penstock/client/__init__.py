"""The Python client of the NATS API, imported as ``penstock``: needs nats-py and msgspec, and nothing of the server.

    async with Client("nats://...") as client:
        answer = await client.chat(model="demo", messages=[{"role": "user", "content": "What is 347 + 586?"}])
        async for chunk in client.chat(model="demo", messages=[...], stream=True):
            print(chunk.text, end="")

Every answer arrives complete, each part once and in order, even if a broker, gateway, router or worker fails meanwhile.
A position (``answer.position``, ``stream.position``) saved as text is enough for another process to continue.
"""

from .answers import (
    Answer,
    Cancelled,
    Choice,
    Chunk,
    Conflict,
    DeadlineExceeded,
    Disconnected,
    Function,
    InvalidRequest,
    Message,
    NotFound,
    Overloaded,
    PenstockError,
    Position,
    Timeout,
    ToolCall,
    Usage,
)
from .client import Call, Client, Stream

__all__ = [
    "Answer",
    "Call",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Disconnected",
    "Function",
    "InvalidRequest",
    "Message",
    "NotFound",
    "Overloaded",
    "PenstockError",
    "Position",
    "Stream",
    "Timeout",
    "ToolCall",
    "Usage",
]
