"""Separates a request with ``no_store`` into what is stored on disk and what is kept in memory storage. Pure.

The streams of the log have such a request without its content: ids, tenant, model, counts, times, ends, and the names
of the prompt's blocks, which suffice for routing. The content is in the stream MEMORY_CONTENTS, in parts:

    request               the whole ``GenerateRequest``
    <attempt>[-<stage>]   a whole message of WORK, if it has content; the header ``Penstock-Part`` names it

A reader of the log who guesses a whole prompt can confirm the guess by the block names.
"""

import msgspec
from blake3 import blake3

from penstock.schemas import jobs
from penstock.schemas.jobs import Job
from penstock.schemas.requests import Fallback, GenerateRequest, Media, decode
from penstock.schemas.trace import Trace
from penstock.schemas.transfer import Encoded, Prefilled
from penstock.schemas.wire import encode

REQUEST = "request"  # name of the part with the whole request


def without_content(request: GenerateRequest, key: bytes) -> GenerateRequest:
    """The request for the log: the fields that placement, lists and audits read, without its client's text.

    Args:
        key: 32 secret bytes that key the digests of media and the session, which routers only compare.
    """
    media = tuple(
        Media(blake3(each.digest, key=key).digest(), "", 0, each.position, each.tokens, each.private)
        for each in request.media
    )
    session = request.session and blake3(request.session.encode(), key=key).hexdigest(16)
    fallbacks = tuple(
        Fallback(each.model, encode(without_content(decode(each.request), key)) if each.request else b"")
        for each in request.fallbacks
    )
    left = request.without_texts(trace=request.trace and Trace(request.trace.parent), fallbacks=fallbacks)
    return msgspec.structs.replace(left, salt="", media=media, session=session)


def part_of(attempt: int, stage: str = "") -> str:
    """The name of the part with the message that starts an attempt or one of its later stages."""
    return f"{attempt}-{stage}" if stage else str(attempt)


def has_content(message: Job | Encoded | Prefilled) -> bool:
    """Whether a message, apart from its request, has content that must not be on a disk."""
    if isinstance(message, Prefilled):
        return True
    job = jobs.decode_job(message.job) if isinstance(message, Encoded) else message
    return bool(job.resume or job.endings or job.logprobs or job.scores)


def shell_of(message: Job | Encoded | Prefilled) -> Job | Encoded | Prefilled:
    """A message of WORK without its content.

    Args:
        message: one whose request has no content any more.
    """
    if isinstance(message, Job):
        return msgspec.structs.replace(message, resume=(), finished=(), endings=(), logprobs=(), scores=(), scored=0)
    job = msgspec.Raw(encode(shell_of(jobs.decode_job(message.job))))
    if isinstance(message, Prefilled):
        return msgspec.structs.replace(message, job=job, opaque=b"")
    return msgspec.structs.replace(message, job=job)
