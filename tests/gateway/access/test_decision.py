import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.access.authentication import Caller, caller_with, check_valid, find_key
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey, check_id, decode, digest_of, id_of, new_key
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import Limits
from penstock.schemas.wire import encode

ID = "0a1b2c3d4e5f"
TEXT = f"pst-{ID}-Vzs8ZWQSwMH6Dw3eSQ4WHoF9Es0wYMAEtDxTvwIt"
KEY = ApiKey(ID, digest_of(TEXT.encode()))
TABLE = {ID: KEY}


def refusal(presented: bytes) -> ServingError:
    with pytest.raises(ServingError) as caught:
        find_key(presented, TABLE)
    assert caught.value.code is Code.invalid_api_key
    return caught.value


def test_a_key_is_found_by_its_whole_text() -> None:
    assert find_key(TEXT.encode(), TABLE) is KEY


@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=1, max_size=3))
def test_a_key_with_any_other_character_is_not_valid(at: int, instead: bytes) -> None:
    changed = TEXT.encode()[:at] + instead + TEXT.encode()[at + 1 :]
    if changed != TEXT.encode():
        refusal(changed)


@pytest.mark.parametrize(
    "presented",
    [
        b"", b"pst-", ID.encode(), TEXT[:-1].encode(), TEXT.encode() + b"A", TEXT.encode() + b"\n",
        b" " + TEXT.encode(),
        TEXT.upper().encode(), TEXT.encode("utf-16"), TEXT.replace("-", "\u2011").encode(), b"A" * 1_000_000,
        f"pst-{'>' * 12}-{'A' * 40}".encode(), f"pst-*.*.*.*.*.*.-{'A' * 40}".encode(), b"pst-" + b"\xff" * 53,
    ],
)  # fmt: skip
def test_what_is_not_a_key_gets_one_and_the_same_answer(presented: bytes) -> None:
    error = refusal(presented)
    assert error.message == refusal(f"pst-{'0' * 12}-{'A' * 40}".encode()).message
    assert error.message == refusal(TEXT[:-4].encode() + b"zzzz").message


def test_a_key_is_valid_until_it_expires_or_is_revoked() -> None:
    check_valid(KEY, 5)
    check_valid(msgspec.structs.replace(KEY, expires_ns=6), 5)
    for key in (msgspec.structs.replace(KEY, expires_ns=5), msgspec.structs.replace(KEY, revoked_ns=9)):
        with pytest.raises(ServingError) as caught:
            check_valid(key, 5)
        assert caught.value.code is Code.invalid_api_key
        assert TEXT not in caught.value.message


def test_the_caller_is_of_the_keys_tenant_and_sees_only_its_answers_unless_it_is_an_operator() -> None:
    tenants = {"acme": Limits()}
    caller = caller_with(msgspec.structs.replace(KEY, tenant="acme"), tenants)
    assert isinstance(caller, Caller)
    assert (caller.tenant, caller.sees, caller.own_cache) == ("acme", "acme", True)
    caller = caller_with(msgspec.structs.replace(KEY, operator=True), tenants)
    assert isinstance(caller, Caller)
    assert (caller.tenant, caller.sees) == (DEFAULT_TENANT, None)


@pytest.mark.parametrize(
    ("of_key", "of_tenant", "may"),
    [
        ((), (), {"a", "b", "c"}),
        (("a",), (), {"a"}),
        ((), ("b",), {"b"}),
        (("a", "b"), ("b", "c"), {"b"}),
    ],
)
def test_a_key_may_name_what_both_it_and_its_tenant_may(
    of_key: tuple[str, ...], of_tenant: tuple[str, ...], may: set[str]
) -> None:
    key = msgspec.structs.replace(KEY, tenant="acme", models=of_key)
    caller = caller_with(key, {"acme": Limits(models=of_tenant)})
    assert isinstance(caller, Caller)
    assert {name for name in "abc" if caller.may_name(name)} == may


def test_a_key_of_a_removed_tenant_or_without_a_model_in_common_is_refused() -> None:
    key = msgspec.structs.replace(KEY, tenant="acme", models=("a",))
    for tenants in ({}, {"acme": Limits(models=("b",))}):
        assert isinstance(caller_with(key, tenants), ServingError)


def test_new_keys_are_long_random_and_parse() -> None:
    made = {new_key() for _ in range(100)}
    assert len({text for _, text in made}) == 100
    for name, text in made:
        assert id_of(text.encode()) == name == check_id(f"pst-{name}") == check_id(name) == check_id(text)
        assert len(text) == 57


def test_a_text_that_names_no_key_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="not the prefix of a key") as caught:
        check_id(TEXT[:-1])
    assert TEXT[20:-1] not in str(caught.value)


def test_what_is_stored_of_a_key_does_not_contain_it() -> None:
    stored = encode(KEY)
    assert TEXT.split("-")[2].encode() not in stored
    assert decode(stored) == KEY
