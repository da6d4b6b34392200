"""Choices take turns in one order, whatever order their tokens came in."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.nats.messages import ChoiceInterleaver, StreamMessages
from penstock.schemas.done import Done, Outcome
from penstock.schemas.done import items as items_of
from penstock.schemas.requests import GenerateRequest, Sampling, Stop
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, Logprob, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.pipeline.support import MODEL, Oracle

ORACLE = Oracle(MODEL)

answers = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["length", "stop", "token"])), min_size=2, max_size=4)


def finish_of(reason: str) -> Finish:
    return Finish("stop", 7) if reason == "token" else Finish(reason)


def request_of(choices: int, logprobs: bool = False) -> GenerateRequest:
    sampling = Sampling(logprobs=1 if logprobs else None)
    return GenerateRequest(
        "r", "tiny", "g", b"", Stop(16), 0, 1, n=choices, sampling=sampling, endpoint="chat", form="stream"
    )


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[tuple[int, str]], list[list[TokenItem]]]:
    """An answer, and its items as some worker cut them and some reader got them: each choice's own in order."""
    answer = draw(answers)
    queues: list[list[TokenItem]] = []
    for choice, (length, reason) in enumerate(answer):
        length = max(length, reason == "token")  # a stop token is a token
        cuts = sorted({*draw(st.lists(st.integers(0, length), max_size=4)), 0, length})
        parts = [
            TokenItem("r", 1, choice, a, tokens_of(choice, a, b), None, logprobs_of(a, b)) for a, b in pairwise(cuts)
        ]
        finish = finish_of(reason)
        apart = reason != "token" and draw(st.booleans())
        if parts and not apart:
            last = parts[-1]
            parts[-1] = TokenItem("r", 1, choice, last.first, last.tokens, finish, last.logprobs)
        else:
            parts.append(TokenItem("r", 1, choice, length, b"", finish))
        queues.append(parts)
    order = draw(st.permutations([choice for choice, parts in enumerate(queues) for _ in parts]))
    items = [queues[choice].pop(0) for choice in order]
    at = sorted(draw(st.lists(st.integers(0, len(items)), max_size=5)))
    batches = [items[a:b] for a, b in zip([0, *at], [*at, len(items)], strict=True)]
    return answer, batches


def tokens_of(choice: int, start: int, end: int) -> bytes:
    return pack_tokens([1000 + 100 * choice + at for at in range(start, end)])


def logprobs_of(start: int, end: int) -> tuple[Logprob, ...]:
    return tuple(Logprob(-float(at + 1)) for at in range(start, end))


@given(deliveries())
def test_choices_take_turns_one_token_each(delivery: tuple[list[tuple[int, str]], list[list[TokenItem]]]) -> None:
    answer, batches = delivery
    rounds = ChoiceInterleaver(len(answer), lambda finish: finish.stop.__class__ is int)
    said = [item for batch in batches for item in rounds.push(batch)]
    turns = [0] * len(answer)
    for item in said:
        least = min(turns[choice] for choice in range(len(answer)) if turns[choice] >= 0)
        assert turns[item.choice] == least, "nobody is ahead"
        assert len(item.tokens) <= 4
        turns[item.choice] = turns[item.choice] + 1 if item.finish is None else -1
    assert turns == [-1] * len(answer), "every choice ended"
    for choice, (length, reason) in enumerate(answer):
        mine = b"".join(item.tokens for item in said if item.choice == choice)
        assert mine == tokens_of(choice, 0, max(length, reason == "token"))


@given(deliveries(), st.booleans())
def test_an_answer_has_the_same_messages_live_and_from_its_record(
    delivery: tuple[list[tuple[int, str]], list[list[TokenItem]]], logprobs: bool
) -> None:
    answer, batches = delivery
    request = request_of(len(answer), logprobs)
    live = StreamMessages(request, ORACLE.model.detokenizer)
    messages = [message for batch in batches for message in live.push(batch)]
    outcomes = []
    for choice, (length, reason) in enumerate(answer):
        length, finish = max(length, reason == "token"), finish_of(reason)
        known = logprobs_of(0, length) if logprobs else ()
        outcomes.append(Outcome(tokens_of(choice, 0, length), finish.reason, finish.stop, logprobs=known))
    record = Done("r", "tiny", 1, choices=tuple(outcomes))
    again = StreamMessages(request, ORACLE.model.detokenizer)
    assert again.push(items_of(record)) == messages
    assert messages[-1].final
    assert [message.number for message in messages] == list(range(len(messages)))


def test_an_error_of_the_whole_request_is_passed_on() -> None:
    failed = TokenItem("r", 1, WHOLE_REQUEST, 0, b"", Finish("error", code="worker_lost"))
    assert ChoiceInterleaver(1, lambda finish: False).push([failed]) == [failed]
