"""Requests that an export has once, as messages of REQUESTS, to which its jobs and records refer by their sequence.

Writers know which messages of REQUESTS the file gets, readers keep those that they have read.
"""

import tempfile
from array import array
from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple

from penstock.cli.terminal import reason
from penstock.log.sources.blocks import body, message_id
from penstock.log.sources.log_line import no_request
from penstock.log.sources.selection import Selection
from penstock.log.sources.stream import StoredStream
from penstock.schemas.ids import time_of

IN_MEMORY_BYTES = 64 << 20
INDEXED_BLOCKS = 3  # of up to 8 MiB: requests end in nearly the order in which they were accepted


class WrittenRequests:
    """The requests that were written so far, by id: their sequences, and hashes of their bytes."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[int, int]] = {}

    def add(self, request: str, sequence: int, data: bytes) -> None:
        self._by_id[request] = sequence, hash(data)

    def sequence_of(self, request: str, data: bytes) -> int:
        """Of the message of REQUESTS with these bytes; 0: it was not written."""
        sequence, hashed = self._by_id.get(request, (0, 0))
        return sequence if sequence and hashed == hash(data) else 0


class _Indexed(NamedTuple):
    """One block: its bytes, and by the id of each selected request its sequence and place."""

    block: bytes
    places: dict[bytes, tuple[int, int]]


class StoredRequests:
    """The requests that several processes write, each of which finds them in the files of a stopped deployment.

    Args:
        stored: the stream REQUESTS.
        since_ns: and ``until_ns``: messages stored outside are not in the file (Unix; 0: open).
    """

    def __init__(self, stored: StoredStream, chosen: Selection, since_ns: int, until_ns: int) -> None:
        self._stored = stored
        self._chosen = chosen
        self._since_ns = since_ns
        self._until_ns = until_ns
        self._indexed: OrderedDict[int, _Indexed] = OrderedDict()

    def sequence_of(self, request: str, data: bytes) -> int:
        """As of ``WrittenRequests``."""
        name = request.encode()
        for number in reversed(self._indexed):
            if name in self._indexed[number].places:
                return self._same(self._indexed[number], name, data)
        try:
            first = self._stored.index_since(time_of(request))
        except ValueError:
            return 0
        for number in (first, first + 1):  # it was stored after its id was made
            if number not in self._indexed and number < len(self._stored.blocks):
                indexed = self._index(number)
                if name in indexed.places:
                    return self._same(indexed, name, data)
        return 0

    def _same(self, indexed: _Indexed, name: bytes, data: bytes) -> int:
        sequence, at = indexed.places[name]
        return sequence if body(indexed.block, at) == data else 0

    def _index(self, number: int) -> _Indexed:
        block, places = self._stored.block(number)
        until, has = self._until_ns, self._chosen.has
        found = {
            message_id(block, at): (seq, at)
            for seq, time_ns, at in places
            if time_ns >= self._since_ns and (not until or time_ns <= until)
        }
        if not self._chosen.everything:
            found = {name: place for name, place in found.items() if has(name.decode(errors="replace"))}
        self._indexed[number] = _Indexed(block, found)
        if len(self._indexed) > INDEXED_BLOCKS:
            self._indexed.popitem(last=False)
        return self._indexed[number]


class ReadRequests:
    """The messages of REQUESTS that were read so far, in a temporary file once they are many."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115 - until `close`
        self._sequences = array("Q")
        self._ends = array("Q", [0])  # in the file; of the message behind the place of its sequence

    def add(self, sequence: int, data: bytes) -> None:
        """Sequences ascend; another one is left out.

        Raises:
            ValueError: the temporary file cannot be written.
        """
        if self._sequences and sequence <= self._sequences[-1]:
            return
        try:
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._file.flush()
        except OSError as error:  # not as an OSError, which readers take for the end of a damaged file
            raise ValueError(
                f"requests of the export cannot be kept in {tempfile.gettempdir()}: {reason(error)}; "
                "set TMPDIR to a disk with room"
            ) from error
        self._sequences.append(sequence)
        self._ends.append(self._ends[-1] + len(data))

    def at(self, sequence: int) -> bytes:
        """
        Raises:
            BadLine: there is none.
        """
        place = bisect_left(self._sequences, sequence)
        if place == len(self._sequences) or self._sequences[place] != sequence:
            return no_request(sequence)
        self._file.seek(self._ends[place])
        return self._file.read(self._ends[place + 1] - self._ends[place])

    def close(self) -> None:
        self._file.close()
