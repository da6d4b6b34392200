"""The table of clients says what their runs found. The runs themselves are ``make test-clients``."""

import json

from tests.clients.catalogue import CLIENTS, FEATURES, HERE, RESULTS
from tests.clients.environments import REQUIREMENTS
from tests.clients.table import PAGE, page

PASSED = {"feature": "chat", "what": "create", "problem": ""}


def results(*checks: dict[str, str], problem: str = "") -> dict[str, object]:
    client = {"versions": {"openai": "3.1"}, "checks": list(checks), "problem": problem}
    return {"date": "2026-11-23", "clients": {CLIENTS[0].name: client}}


def test_the_page_is_what_the_kept_results_say() -> None:
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(kept)
    assert list(kept["clients"]) == [client.name for client in CLIENTS if client.name in kept["clients"]]
    assert {check["feature"] for each in kept["clients"].values() for check in each["checks"]} <= FEATURES.keys()


def test_one_failed_check_is_a_cross_and_named() -> None:
    failed = PASSED | {"what": "a `b|c`", "problem": "AssertionError: <x>\nmore"}
    made = page(results(PASSED, failed))
    assert f"| {CLIENTS[0].title} | 3.1 | ✗ |" in made
    assert r"a \`b\|c\`: AssertionError: \<x\> more" in made
    passed = page(results(PASSED))
    assert f"| {CLIENTS[0].title} | 3.1 | ✓ |" in passed
    assert "What does not work" not in passed


def test_a_client_that_did_not_start_is_named() -> None:
    assert "no network" in page(results(problem="OSError: no network"))


def test_every_client_has_a_program_and_its_packages() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        assert (HERE / "programs" / client.program).is_file()
        assert client.program.endswith(".mjs") or (REQUIREMENTS / client.requirements).read_text(encoding="utf-8")
