"""No slot ever has two owners, none leaks, and what somebody holds stays what it was."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.core.embeddings import EmbeddingCache, Key
from penstock.workers.engines.engine_protocol import MediaReservation

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def reserve(cache: EmbeddingCache, *media: Key) -> MediaReservation:
    reservation = cache.reserve(media)
    assert reservation is not None
    return reservation


def filled(cache: EmbeddingCache, *media: Key) -> MediaReservation:
    reservation = reserve(cache, *media)
    cache.adopt(reservation)
    return reservation


def test_a_medium_takes_whole_slots_and_is_found_once_it_was_filled() -> None:
    cache = EmbeddingCache(5, 4)
    first = reserve(cache, (A, 4), (B, 5))
    assert ([len(slots) for slots in first.slots], first.have) == ([1, 2], [False, False])
    cache.adopt(first)
    again = reserve(cache, (B, 5), (A, 4))
    assert (again.slots, again.have) == ([first.slots[1], first.slots[0]], [True, True])
    place = first.slots[0]
    cache.release(first)
    cache.release(again)
    assert (cache.used_slots, cache.cached_slots, cache.free_slots) == (0, 3, 2)
    assert reserve(cache, (A, 4)).slots == [place]


def test_unfilled_slots_are_forgotten_when_they_are_let_go_of() -> None:
    cache = EmbeddingCache(2, 4)
    cache.release(reserve(cache, (A, 4)))
    assert (cache.cached_slots, cache.free_slots) == (0, 2)
    assert reserve(cache, (A, 4)).have == [False]


def test_two_may_fill_the_same_medium_at_once_and_the_first_to_finish_names_it() -> None:
    cache = EmbeddingCache(3, 4)
    one, two = reserve(cache, (A, 4)), reserve(cache, (A, 4))
    assert one.have == two.have == [False]
    assert one.slots != two.slots
    cache.adopt(two)
    cache.adopt(one)
    three = reserve(cache, (A, 4))
    assert (three.slots, three.have) == (two.slots, [True])
    cache.release(one)
    assert cache.free_slots == 2
    cache.release(two)
    cache.release(three)
    assert (cache.cached_slots, cache.free_slots) == (1, 2)


def test_a_medium_that_is_shown_twice_is_filled_once() -> None:
    cache = EmbeddingCache(1, 4)
    reservation = reserve(cache, (A, 3), (A, 3))
    assert reservation.have == [False, True]
    assert reservation.slots[0] == reservation.slots[1]
    cache.adopt(reservation, [0])
    assert reserve(cache, (A, 3)).have == [True]
    cache.release(reservation)
    assert cache.used_slots == 1  # the second reservation still holds it


def test_the_same_bytes_with_another_number_of_tokens_are_another_medium() -> None:
    cache = EmbeddingCache(4, 4)
    filled(cache, (A, 3))
    assert reserve(cache, (A, 4)).have == [False]


def test_the_least_recently_used_goes_first_and_what_is_asked_for_never() -> None:
    cache = EmbeddingCache(3, 4)
    for digest in (A, B, C):
        cache.release(filled(cache, (digest, 4)))
    cache.release(reserve(cache, (A, 4)))  # used again: now B is the oldest
    found = reserve(cache, (C, 4), (D, 4))
    assert found.have == [True, False]
    assert reserve(cache, (A, 4)).have == [True]
    assert cache.reserve([(B, 4)]) is None


def test_what_has_no_room_changes_nothing() -> None:
    cache = EmbeddingCache(3, 4)
    cache.release(filled(cache, (A, 4)))
    held = filled(cache, (B, 8))
    generations = list(cache.generations)
    assert cache.reserve([(A, 4), (C, 1)]) is None
    assert cache.reserve([(C, 5)]) is None
    assert list(cache.generations) == generations
    assert (cache.used_slots, cache.cached_slots) == (2, 1)
    cache.release(held)
    assert reserve(cache, (A, 4)).have == [True]


def test_a_generation_changes_with_the_owner_of_a_slot_only() -> None:
    cache = EmbeddingCache(1, 4)
    first = filled(cache, (A, 4))
    before = cache.generations_of(first)
    cache.release(first)
    again = reserve(cache, (A, 4))
    assert cache.generations_of(again) == before
    cache.release(again)
    assert cache.generations_of(reserve(cache, (B, 4))) != before


def test_generations_wrap_around() -> None:
    cache = EmbeddingCache(1, 4)
    cache.generations[0] = 0xFFFFFFFF
    assert cache.generations_of(reserve(cache, (A, 1))) == [0]


def test_letting_go_twice_does_nothing() -> None:
    cache = EmbeddingCache(2, 4)
    one, two = filled(cache, (A, 4)), reserve(cache, (A, 4))
    cache.release(one)
    cache.release(one)
    assert cache.used_slots == 1
    cache.release(two)
    assert cache.cached_slots == 1


@pytest.mark.parametrize("make", [lambda: EmbeddingCache(0, 4), lambda: EmbeddingCache(4, 0)])
def test_an_empty_pool_is_refused(make: Callable[[], EmbeddingCache]) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        make()


def test_a_medium_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        EmbeddingCache(2, 4).reserve([(A, 0)])


MEDIA = st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(1, 9)), min_size=1, max_size=4)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), MEDIA),
        st.tuples(st.just("adopt"), st.integers(0, 5)),
        st.tuples(st.just("let go"), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(slots=st.integers(1, 8), actions=ACTIONS)
def test_whatever_happens_every_slot_has_one_owner_and_keeps_its_content_while_it_is_held(
    slots: int, actions: list[tuple[str, object]]
) -> None:
    cache = EmbeddingCache(slots, 4)
    content: dict[int, tuple[Key, int]] = {}  # slot -> what was written into it
    held: list[tuple[MediaReservation, list[Key], list[int]]] = []
    for action, argument in actions:
        if action == "reserve":
            assert isinstance(argument, list)
            before = (cache.used_slots, cache.cached_slots, list(cache.generations))
            reservation = cache.reserve(argument)
            if reservation is None:
                assert (cache.used_slots, cache.cached_slots, list(cache.generations)) == before
                continue
            assert [len(part) for part in reservation.slots] == [-(-tokens // 4) for _, tokens in argument]
            for key, part, have in zip(argument, reservation.slots, reservation.have, strict=True):
                if not have:  # the owner fills it, and nobody who holds something may lose it by that
                    others = {slot for other, _, _ in held for p in other.slots for slot in p}
                    assert not others & set(part)
                    content.update({slot: (key, number) for number, slot in enumerate(part)})
            held.append((reservation, argument, cache.generations_of(reservation)))
        elif held:
            assert isinstance(argument, int)
            reservation, _, _ = held[argument % len(held)]
            if action == "adopt":
                cache.adopt(reservation)
            else:
                cache.release(held.pop(argument % len(held))[0])
        for reservation, media, generations in held:
            assert cache.generations_of(reservation) == generations
            for key, part in zip(media, reservation.slots, strict=True):
                assert [content[slot] for slot in part] == [(key, number) for number in range(len(part))]
        used = {slot for reservation, _, _ in held for part in reservation.slots for slot in part}
        assert cache.used_slots == len(used)
        assert cache.used_slots + cache.cached_slots + cache.free_slots == slots
    for reservation, _, _ in held:
        cache.release(reservation)
    assert cache.used_slots == 0
    assert reserve(cache, (b"everything", 4 * slots)).have == [False]
