"""JSON rewritten so that two texts of the same value are equal: keys sorted, without whitespace.

Large values are rewritten in slices, as one call of the decoder or encoder holds the interpreter until it returns.
"""

from collections.abc import Collection

import msgspec

SLICE = 65_536  # bytes
DEPTH = 4  # objects and arrays within each other that are taken apart; each is scanned once more

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_json = msgspec.json.encode


def canonical_json(text: bytes, *, without: Collection[str] = (), depth: int = DEPTH) -> bytes:
    """
    Args:
        without: members of the outermost object to leave out.
    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: not JSON.
    """
    text = text.strip(b" \t\r\n")
    if text[:1] == b"{" and (without or (len(text) > SLICE and depth)):
        members = sorted((key, bytes(raw)) for key, raw in _object(text).items() if key not in without)
        return b"{%b}" % b",".join([_json(key) + b":" + canonical_json(raw, depth=depth - 1) for key, raw in members])
    if text[:1] == b"[" and len(text) > SLICE and depth:
        return b"[%b]" % b",".join(_canonical_elements(_array(text), depth - 1))
    return _json(msgspec.json.decode(text), order="deterministic")


def _canonical_elements(elements: list[msgspec.Raw], depth: int) -> list[bytes]:
    """Short elements are rewritten many at a time."""
    out: list[bytes] = []
    few: list[msgspec.Raw] = []
    size = 0
    for element in elements:
        length = len(bytes(element)) + 1
        if few and size + length > SLICE:
            out.append(canonical_json(b"[%b]" % b",".join(few), depth=0)[1:-1])
            few, size = [], 0
        if length > SLICE:
            out.append(canonical_json(bytes(element), depth=depth))
        else:
            few.append(element)
            size += length
    if few:
        out.append(canonical_json(b"[%b]" % b",".join(few), depth=0)[1:-1])
    return out
