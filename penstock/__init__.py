"""Serves large language models as an event-sourced pipeline on NATS JetStream.

The names below are the Python client of the NATS API. It needs nats-py and msgspec, and nothing of the server; its
documentation is that of ``penstock.client``. It is imported when one of them is used: every command imports
this package, and would otherwise wait for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client import (
        Answer,
        Call,
        Cancelled,
        Choice,
        Chunk,
        Client,
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
        Stream,
        Timeout,
        ToolCall,
        Usage,
    )

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

if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from penstock import client

        return getattr(client, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
