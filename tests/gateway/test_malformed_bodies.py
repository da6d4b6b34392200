"""A thousand malformed bodies for each route that takes a body of text, refused with 4xx and nothing else."""

from collections.abc import Callable

import pytest

from tests.gateway.malformed import ROUTES, malformed, refusal


@pytest.mark.parametrize("path", ROUTES)
def test_a_thousand_malformed_bodies_are_refused(path: str) -> None:
    valid, prepare = ROUTES[path]
    _check(prepare, list(malformed(valid, 1_600, seed=len(path))))


def _check(prepare: Callable[[bytes], object], bodies: list[bytes]) -> None:
    refused = [error for body in bodies if (error := refusal(prepare, body)) is not None]
    assert len(refused) >= 1_000
    assert len(refused) < len(bodies), "a body that is changed where it does not matter is served"
    for error in refused:
        assert 400 <= error.code.status < 500, error
        assert error.message
        error.message.encode(), (error.param or "").encode()
