"""Requests that were found to crash every worker: entries of the ``verdicts`` bucket, which gateways write and follow.

An entry is valid for an hour. The entry of a request with ``no_store`` is not stored: gateways send it to each other
and keep it in memory.
"""

import msgspec
from blake3 import blake3

from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import decoder, encode

HOLDS_S = 3600
SECRET = "secret"  # the bucket's key whose value keys the digests


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    Attributes:
        request: id of the request.
        at_ns: Unix time of the verdict.
        repeated: id of its first repeat, which runs alone; "": there was none. Later ones are refused.
    """

    request: str
    at_ns: int
    repeated: str = ""


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict that must not be stored. ``verdict`` None: it was withdrawn."""

    key: str
    verdict: Verdict | None = None


decode = decoder(Verdict)
decode_announced = decoder(Announced)


def key_of(request: GenerateRequest, secret: bytes) -> str:
    """A digest that repeats of a request share: of tenant, model, revision, and everything that a worker computes.

    It does not include the seed, which a gateway draws if the client gives none.

    Args:
        secret: the deployment's 32 secret bytes.
    """
    diffusion = request.diffusion
    content = (
        request.model,
        request.revision,
        request.prompt,
        msgspec.structs.replace(request.sampling, seed=0),
        request.stop,
        request.n,
        request.lora,
        tuple((media.digest, media.position) for media in request.media),
        msgspec.structs.replace(diffusion, seed=0) if diffusion is not None else None,
        request.embedding,
        request.constraint,
    )
    return f"{request.tenant}.{blake3(encode(content), key=secret).hexdigest(length=16)}"
