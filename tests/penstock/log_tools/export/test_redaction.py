"""What a redacted export says and what it does not."""

from typing import Any

import msgspec

from penstock.log_tools.export.redaction import FIRST_TOKEN, Redactor
from penstock.log_tools.sources.log_line import DECODE, LogLine
from penstock.schemas import block_hashes, jobs, requests
from penstock.schemas.done import Done, Outcome, recorded
from penstock.schemas.jobs import Stage
from penstock.schemas.kv import KvBatch, Stored
from penstock.schemas.requests import PAIRS, Embedding, Fallback, GenerateRequest, LogitsProcessor, Sampling, Stop
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import Finish, Logprob, TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens, unpack_tokens
from tests.penstock.log_tools.traces import samples

KEY = bytes(32)
SECRET = "the secret plan"


def asked(tokens: list[int], **more: Any) -> GenerateRequest:
    packed = pack_tokens(tokens)
    return samples.request(prompt=packed, digests=block_hashes.chain(packed, 32, block_hashes.root("r")), **more)


def redact(redactor: Redactor, stream: str, message: object, subject: str = "s") -> LogLine:
    found = redactor.record(LogLine(stream, 1, "", subject, {}, encode(message)))
    assert found is not None
    return found


def prompt(request: GenerateRequest) -> list[int]:
    return list(unpack_tokens(request.prompt))


def test_equal_prefixes_stay_equal_and_end_where_they_ended() -> None:
    redactor = Redactor(key=KEY)
    one = redactor.request(asked([7] * 70 + [1, 2, 3]))
    other = redactor.request(asked([7] * 70 + [9, 2, 3]))
    assert prompt(one)[:70] == prompt(other)[:70]
    assert prompt(one)[70:] != prompt(other)[70:]
    assert len(one.digests) == 32
    assert one.digests == other.digests
    assert min(prompt(one)) >= FIRST_TOKEN
    assert max(prompt(one)) < 1000
    assert len(set(prompt(one)[:70])) > 40, "a frequent token has no frequent placeholder"
    assert prompt(Redactor().request(asked([7] * 70))) != prompt(Redactor().request(asked([7] * 70)))


def test_blocks_have_the_same_names_in_prompts_and_kv_events() -> None:
    redactor = Redactor(key=KEY)
    request = asked(list(range(96)))
    first, second, third = block_hashes.split(request.digests)
    batch = KvBatch("w", 1, 0, (Stored(second + third, first),))
    stored = DECODE["KV"](redact(redactor, "KV", batch).data).events[0]
    assert stored.parent + stored.digests == redactor.request(request).digests
    assert first not in stored.parent


def test_an_answer_has_one_placeholder_per_token_in_all_streams() -> None:
    redactor = Redactor(key=KEY)
    request, answer = asked([5, 6, 7]), [11, 12, 13, 14]
    redact(redactor, "REQUESTS", request)
    seen: list[int] = []
    for first, part, finish in ((0, [11], None), (1, [12, 13, 14], Finish("stop", SECRET))):
        logprobs = tuple(Logprob(-0.5, ((token, -0.5), (99, -2.0)), 1) for token in part)
        item = TokenItem(request.id, 1, 0, first, pack_tokens(part), finish, logprobs)
        batch = DECODE["TOKENS"](redact(redactor, "TOKENS", TokenBatch("w", 1, 0, (item,))).data)
        own = list(unpack_tokens(batch.items[0].tokens))
        assert [found.top[0][0] for found in batch.items[0].logprobs] == own
        seen += own
    for submitted in (encode(request), recorded(request)):
        done = Done(request.id, "tiny", 1, choices=(Outcome(pack_tokens(answer), "stop", SECRET),), submitted=submitted)
        ended = DECODE["DONE"](redact(redactor, "DONE", done).data)
        assert list(unpack_tokens(ended.choices[0].tokens)) == seen
    job = msgspec.structs.replace(
        samples.job(1, Stage("decode", "w")), request=msgspec.Raw(encode(request)), resume=(pack_tokens(answer[:2]),)
    )
    resumed = jobs.decode_job(redact(redactor, "WORK", job).data)
    assert list(unpack_tokens(resumed.resume[0])) == seen[:2]
    continued = redactor.request(asked([5, 6, 7, *answer]))
    assert prompt(continued) == [*prompt(requests.decode(resumed.request)), *seen]


def test_nothing_that_a_user_wrote_is_left() -> None:
    redactor = Redactor()
    request = asked(
        [1, 2],
        user=SECRET,
        client_request_id=SECRET,
        salt=SECRET,
        chat=SECRET.encode(),
        tenant="secret-plan",
        stop=Stop(max_tokens=3, strings=(SECRET,)),
        sampling=Sampling(logit_bias={3: 1.0}, logits_processors=(LogitsProcessor("json", SECRET.encode()),)),
        embedding=Embedding(1, texts=(SECRET,), prompt=PAIRS, queries=(SECRET,)),
        fallbacks=(Fallback("small", encode(asked([1], user=SECRET))),),
    )
    done = Done(request.id, "tiny", 1, choices=(Outcome(b"", "stop", SECRET),), user=SECRET, submitted=encode(request))
    subject = Subjects("ps").done("secret-plan", "tiny", request.id)
    for stream, message in (("REQUESTS", request), ("DONE", done)):
        found = redact(redactor, stream, message, subject)
        assert b"secret" not in found.data
        assert stream != "DONE" or "secret" not in found.subject
    stop = redactor.request(request).stop.strings[0]
    assert (len(stop), stop) == (len(SECRET), redactor.text(SECRET))


def test_the_names_of_a_prompt_s_blocks_are_left_out_of_headers() -> None:
    line = LogLine("REQUESTS", 1, "", "s", {"Penstock-Keys": "AQAAAAAAAAA=", "Nats-Msg-Id": "r"}, encode(asked([1])))
    found = Redactor().record(line)
    assert found is not None
    assert found.headers == {"Nats-Msg-Id": "r"}


def test_what_cannot_be_read_is_left_out() -> None:
    assert Redactor().record(LogLine("DONE", 1, "", "s", {}, b"secret")) is None
    assert Redactor().record(LogLine("LATER", 1, "", "s", {}, b"secret")) is None
