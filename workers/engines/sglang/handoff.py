"""Rooms: how a prefill and a decode engine of SGLang find each other for one sequence. Pure.

Both engines run a sequence at the same time. The prefill engine does not begin before the decode engine has reserved
blocks, and reports its token only after the KV was fetched; the decode engine gets the first token with the KV. So the
prefill worker hands a request over before it has computed anything (``StepResult.handed``), and the state has no KV's
location but that of the prefill engine's bootstrap server and a room, a number that both engines are given. Each choice
of a request has a room of its own.

A decode engine cannot compute a prompt. Without a state that it can use the attempt is given back, and a router places
the request on another pair.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from blake3 import blake3

from penstock.workers.engines.external import handoff_state

FAKE_HOST = "2.2.2.2"  # SGLang's: a request with it runs without the other engine, and its answer is worthless
_ROOM_BITS = 52  # of a request; the choice is added
_CHOICES = 1 << 10


class Address(NamedTuple):
    """Of a prefill engine's bootstrap server."""

    host: str
    port: int


class Room(NamedTuple):
    """Where the engines meet for one sequence. ``rank``: of the prefill engine, if it has several."""

    address: Address
    number: int
    rank: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``async_generate``, equal on both sides."""
        found: dict[str, Any] = {
            "bootstrap_host": self.address.host,
            "bootstrap_port": self.address.port,
            "bootstrap_room": self.number,
        }
        return found if self.rank is None else found | {"disagg_prefill_dp_rank": self.rank}


def room(address: Address, handoff: str, choice: int, rank: int | None = None) -> Room:
    """The room of a choice. Never 0, which SGLang takes for "none"; no two handoffs share one, but for a chance of
    2**-52 per pair.

    Args:
        handoff: names the handoff of a request in one attempt.
    """
    base = int.from_bytes(blake3(handoff.encode()).digest(length=8), "big") >> (64 - _ROOM_BITS)
    return Room(address, (base + 1) * _CHOICES + choice % _CHOICES, rank)


def pack(address: Address, handoff: str, layout: str, tokens: Seq[int], rank: int | None = None) -> bytes:
    """The state for ``Held.opaque``.

    Args:
        tokens: prompt and output so far, of which the prefill engine computes the KV.
    """
    params = {"host": address.host, "port": address.port, "name": handoff, "rank": rank}
    return handoff_state.pack(params, layout, tokens, [])


def unpack(opaque: bytes, layout: str, tokens: Seq[int], choice: int) -> Room:
    """The room of a choice that continues ``tokens``.

    Raises:
        ValueError: the state is damaged, or from another prompt, attempt or KV layout.
    """
    state = handoff_state.unpack(opaque, layout)
    if state.context != handoff_state.digest(tokens):
        raise ValueError("it belongs to other tokens than these")
    host, port, name, rank = (state.params.get(key) for key in ("host", "port", "name", "rank"))
    if not isinstance(host, str) or not isinstance(port, int) or not isinstance(name, str):
        raise ValueError("it names no bootstrap server")
    return room(Address(host, port), name, choice, rank if isinstance(rank, int) else None)
