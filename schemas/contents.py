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
from penstock.schemas.requests import Fallback, GenerateRequest, LogitsProcessor, Media, decode
from penstock.schemas.transfer import Encoded, Prefilled
from penstock.schemas.wire import encode

REQUEST = "request"  # name of the part with the whole request


def without_content(request: GenerateRequest, key: bytes) -> GenerateRequest:
    """The request for the log: the fields that placement, lists and audits read, without its client's text.

    Args:
        key: 32 secret bytes that key the digests of media and the session, which routers only compare.
    """
    sampling, stop = request.sampling, request.stop
    if sampling.logit_bias or sampling.logits_processors:
        processors = tuple(LogitsProcessor(each.name) for each in sampling.logits_processors)
        sampling = msgspec.structs.replace(sampling, logit_bias={}, logits_processors=processors)
    if stop.token_ids or stop.strings:
        stop = msgspec.structs.replace(stop, token_ids=(), strings=())
    media = tuple(
        Media(blake3(each.digest, key=key).digest(), "", 0, each.position, each.tokens, each.private)
        for each in request.media
    )
    drawn, embedding, trace = request.diffusion, request.embedding, request.trace
    if drawn is not None:
        drawn = msgspec.structs.replace(drawn, prompt="", negative="")
    if embedding is not None:
        embedding = embedding.without_texts()
    if trace is not None:
        trace = msgspec.structs.replace(trace, state="")
    session = request.session and blake3(request.session.encode(), key=key).hexdigest(16)
    return msgspec.structs.replace(
        request,
        prompt=b"",
        prompt_length=request.prompt_tokens,
        sampling=sampling,
        stop=stop,
        salt="",
        media=media,
        diffusion=drawn,
        embedding=embedding,
        parsing=None,
        session=session,
        client_body=b"",
        chat=b"",
        constraint=None,
        trace=trace,
        fallbacks=tuple(
            Fallback(each.model, encode(without_content(decode(each.request), key)) if each.request else b"")
            for each in request.fallbacks
        ),
    )


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
