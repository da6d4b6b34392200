"""Bytes on the wire: packed token ids, and MessagePack codecs that are made once."""

import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

TOKEN_BYTES = 4  # of one packed token id
MSGPACK, JSON = "application/msgpack", "application/json"  # media types of messages
_SWAP = sys.byteorder == "big"
assert array("I").itemsize == TOKEN_BYTES

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """A decode function for one message type; raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.Decoder(kind).decode


def content_type(kind: type[msgspec.Struct]) -> str:
    """The ``Content-Type`` header of messages of this kind, for readers who do not know the subjects.

    Its ``schema`` is what ``penstock schema`` takes.
    """
    return f"{MSGPACK}; schema={kind.__name__}"


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian u32.

    Raises:
        OverflowError: an id is negative or above 2**32 - 1.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if _SWAP:
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> "array[int]":
    """Token ids from little-endian u32.

    Raises:
        ValueError: the length is not a multiple of 4.
    """
    tokens = array("I")
    tokens.frombytes(data)
    if _SWAP:
        tokens.byteswap()
    return tokens
