"""The choice of a cell: cached beginnings of the prompt, the load of the least loaded worker, and the nearest cell."""

import asyncio
import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.service.cell_choice import NEAREST, PREFIXES, STEP_TOKENS, CellChoice, CellNews, prefixes_of
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.block_hashes import chain, root
from penstock.schemas.cells import CellLoads, ModelLoad, SentRequest
from penstock.schemas.requests import GenerateRequest, Stop, new_request_id
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import pack_tokens
from tests.infra.bus.support import eventually

MODEL = "m"
SHORT, LONG = 200, 4096  # tokens
ALL = (0, 1, 2)


def asked(tokens: int, seed: int = 0, block_size: int = 32) -> GenerateRequest:
    prompt = pack_tokens([(seed << 16) + each for each in range(tokens)])
    digests = chain(prompt, block_size, root("r"))
    now_ns = time.time_ns()
    return GenerateRequest(
        new_request_id(now_ns), MODEL, "g", prompt, Stop(10), now_ns, now_ns + 10**9, digests=digests,
        block_size=block_size,
    )  # fmt: skip


def loads(tokens: float, workers: int = 2) -> CellLoads:
    return CellLoads("router", (ModelLoad(MODEL, tokens, workers),))


async def test_what_was_sent_is_told_to_others_without_waiting_for_the_broker() -> None:
    """``publish`` waits for a link that is stalled, and what was sent meanwhile was kept without a limit."""
    posted: list[bytes] = []

    class Client:
        def post(self, subject: str, payload: bytes) -> bool:
            posted.append(payload)
            return False

        async def publish(self, *_: object) -> None:
            await asyncio.Event().wait()

    tasks = Tasks("test")
    home = SimpleNamespace(nc=Client(), connected=True, subjects=Subjects("ps"))
    news = CellNews([home], "gw", CellChoice(2, 0), tasks)  # type: ignore[list-item]
    for _ in range(3):
        news.sent(SentRequest(0, MODEL, 1, ()))
        await eventually(lambda: not len(tasks))
    assert len(posted) == 3
    await tasks.aclose()


def test_without_load_requests_stay_near() -> None:
    choice = CellChoice(3, nearest=1)
    assert [choice.choose(asked(SHORT, seed), ALL).cell for seed in range(4)] == [1, 1, 1, 1]


def test_a_loaded_cell_is_left_when_another_is_better_by_more_than_the_preference() -> None:
    choice = CellChoice(3, nearest=1)
    choice.observe(1, loads(NEAREST - 1))
    assert choice.choose(asked(SHORT), ALL).cell == 1
    choice.observe(1, loads(NEAREST + 1))
    assert choice.choose(asked(SHORT, 1), ALL).cell != 1


def test_what_was_sent_counts_until_routers_have_counted_it() -> None:
    choice = CellChoice(2, nearest=0)
    choice.observe(0, loads(0.0, workers=1))
    chosen = [choice.choose(asked(LONG, seed), (0, 1)).cell for seed in range(4)]
    assert set(chosen) == {0, 1}, "the first of them makes the cell as loaded as it is long"
    choice.observe(0, loads(0.0))
    choice.observe(1, loads(0.0))
    assert choice.choose(asked(SHORT, 9), (0, 1)).cell == 0


def test_a_long_prompt_goes_where_its_beginning_is() -> None:
    choice = CellChoice(3, nearest=0)
    choice.note(SentRequest(2, MODEL, LONG, prefixes_of(asked(LONG))))
    choice.observe(2, loads(0.0))
    sent = choice.choose(asked(LONG + 512), ALL)
    assert (sent.cell, sent.tokens) == (2, 512)


def test_a_short_prompt_does_not_follow_its_beginning() -> None:
    choice = CellChoice(2, nearest=0)
    prompt = asked(300)
    choice.note(SentRequest(1, MODEL, 300, prefixes_of(prompt)))
    assert choice.choose(prompt, (0, 1)).cell == 0


def test_only_usable_cells_are_chosen_and_without_one_the_request_waits_near() -> None:
    choice = CellChoice(3, nearest=0)
    assert choice.choose(asked(SHORT), (2,)).cell == 2
    assert choice.choose(asked(SHORT, 1), ()).cell == 0


def test_what_is_remembered_of_a_cell_is_bounded() -> None:
    choice = CellChoice(1, nearest=0)
    for start in range(0, PREFIXES + 10_000, 10_000):
        choice.note(SentRequest(0, MODEL, 1, tuple(range(start, start + 10_000))))
    assert len(choice._cells[0].prefixes) == PREFIXES


@given(st.integers(1, 3000), st.sampled_from((16, 32, 64, 512)))
def test_beginnings_are_named_by_their_tokens(tokens: int, block_size: int) -> None:
    whole, step = prefixes_of(asked(tokens, block_size=block_size)), max(STEP_TOKENS, block_size)
    assert len(whole) == tokens // step
    assert prefixes_of(asked(tokens + 700, block_size=block_size))[: len(whole)] == whole
    assert not set(whole) & set(prefixes_of(asked(tokens, seed=1, block_size=block_size)))
