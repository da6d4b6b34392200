"""What the log holds of a request with ``no_store``: nothing that its client wrote."""

import msgspec

from penstock.schemas import contents, jobs
from penstock.schemas.jobs import Decision, Job
from penstock.schemas.requests import (
    Constraint,
    Diffusion,
    Embedding,
    Fallback,
    GenerateRequest,
    LogitsProcessor,
    Media,
    Parsing,
    Sampling,
    Stop,
)
from penstock.schemas.tokens import Finish, Logprob
from penstock.schemas.trace import Trace
from penstock.schemas.transfer import Encoded, Endpoint, Prefilled, Ticket
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces import samples
from tests.schemas.test_messages import STAYS as RECORDED

SECRET, SAID, TOKEN = "sesame", b"sesame", 71_077_345
KEY = bytes(range(32))
# What routing, lists and audits read.
STAYS = RECORDED | {"digests"}


def whole_request() -> GenerateRequest:
    return samples.request(
        Trace("", f"vendor={SECRET}"),
        no_store=True,
        prompt=pack_tokens([TOKEN, TOKEN]),
        stop=Stop(9, token_ids=(TOKEN,), strings=(SECRET,)),
        sampling=Sampling(logit_bias={TOKEN: 1.0}, logits_processors=(LogitsProcessor("p", SAID),)),
        salt=SECRET,
        session=SECRET,
        client_body=SAID,
        chat=SAID,
        media=(Media(SAID, "image/png", 3, 1, 2),),
        parsing=Parsing(texts={SECRET: {SECRET: True}}),
        diffusion=Diffusion("image", SECRET, 8, 8, 1, "png", negative=SECRET),
        embedding=Embedding(2, texts=(SECRET,), lengths=(TOKEN,), queries=(SECRET,)),
        constraint=Constraint("regex", SECRET),
        fallbacks=(Fallback("small", encode(samples.request(prompt=SAID, session=SECRET))),),
    )


def test_no_field_but_these_stays_as_it_was() -> None:
    whole = whole_request()
    left = contents.without_content(whole, KEY)
    assert SAID not in encode(left)
    assert pack_tokens([TOKEN]) not in encode(left)
    assert encode(TOKEN) not in encode(left)
    changed = {name for name in whole.__struct_fields__ if getattr(whole, name) != getattr(left, name)}
    assert changed == set(whole.__struct_fields__) - STAYS


def test_routing_reads_the_same_as_of_the_whole_request() -> None:
    whole = whole_request()
    left = contents.without_content(whole, KEY)
    assert left.prompt_tokens == whole.prompt_tokens == 2
    assert [each.name for each in left.sampling.logits_processors] == ["p"]
    assert (left.output, left.stop.max_tokens, left.token_address) == (
        whole.output, whole.stop.max_tokens, whole.token_address
    )  # fmt: skip
    assert [(each.position, each.tokens) for each in left.media] == [(1, 2)]
    assert left.media == contents.without_content(whole, KEY).media, "equal images go to the same encoder"
    assert left.session == contents.without_content(whole, KEY).session
    assert left.session != contents.without_content(whole, bytes(32)).session


def job(**more: object) -> Job:
    left = contents.without_content(whole_request(), KEY)
    return Job(msgspec.Raw(encode(left)), 2, Decision("kv", "w", "r", 5), **more)  # type: ignore[arg-type]


def continued() -> Job:
    return job(
        resume=(pack_tokens([TOKEN]),),
        finished=(0,),
        endings=(Finish("stop", SECRET),),
        logprobs=((Logprob(-0.5, ((TOKEN, -0.5),)),),),
        scores=(Logprob(-1.0, ((TOKEN, -1.0),)),),
        scored=2,
    )


def test_messages_of_every_stage_are_stored_as_shells() -> None:
    ticket = Ticket("t", "w", Endpoint("a", "nixl"), "kv", b"", b"", 1)
    raw = msgspec.Raw(encode(continued()))
    for message in (continued(), Prefilled("r", 2, raw, ticket, opaque=SAID), Encoded("r", 2, raw, ticket)):
        assert contents.has_content(message)
        shell = contents.shell_of(message)
        stored = encode(shell)
        assert SAID not in stored
        assert encode(TOKEN) not in stored
        assert pack_tokens([TOKEN]) not in stored
        read = jobs.decode(stored)
        assert not isinstance(read, jobs.Revoke)
        inner = read if isinstance(read, Job) else jobs.decode_job(read.job)
        assert (inner.decision, inner.attempt) == (continued().decision, 2)


def test_a_first_attempt_has_no_content_of_its_own() -> None:
    assert not contents.has_content(job())
