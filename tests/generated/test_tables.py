"""Tables in pages that are written by hand say what the code does."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from penstock.infra.nats_server.permissions import BROKER_ROLES, permissions
from penstock.infra.text.parsers.families import PACKAGED, read_rows
from penstock.schemas.subjects import Subjects
from tests.generated.tables import DOCS, PAGES, engines


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_that_the_code_makes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert PAGES[path](text) == text, "run: python -m tests.generated"


def test_the_page_of_parsers_has_every_row_with_what_it_was_checked_against() -> None:
    page = (DOCS / "parsers.md").read_text(encoding="utf-8")
    for row in read_rows(PACKAGED):
        assert f"| `{row.name}` | {row.models} |" in page
        assert row.checked


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="sampling options"):
        engines("# Engines\n")


def test_the_commands_for_users_with_jwts_give_the_rights_that_a_configuration_gives() -> None:
    page = (DOCS / "roles.md").read_text(encoding="utf-8").replace("\\\n", " ")
    parser = argparse.ArgumentParser()
    for flag in ("account", "sk", "role", "response-ttl"):
        parser.add_argument(f"--{flag}")
    for flag in ("allow-pub", "allow-sub", "deny-pub"):
        parser.add_argument(f"--{flag}", action="append", default=[])
    parser.add_argument("--allow-pub-response", type=int, default=0)
    found = set()
    for line in re.findall(r"^nsc edit signing-key (.*)$", page, re.MULTILINE):
        given = parser.parse_args(shlex.split(line))
        allowed = permissions(given.role, Subjects())
        assert allowed is not None
        publish, subscribe, deny = (
            {subject for part in parts for subject in part.split(",")}
            for parts in (given.allow_pub, given.allow_sub, given.deny_pub)
        )
        own = f"ps.audit.{given.role}"
        assert {own if each == "ps.audit.{{subject()}}" else each for each in publish} == set(allowed.publish)
        assert subscribe == set(allowed.subscribe)
        assert deny == {each for each in allowed.deny if not each.startswith("ps.audit.")}
        assert (given.allow_pub_response, given.response_ttl) == ((1, "1m") if allowed.respond else (0, None))
        found.add(given.role)
    assert found == set(BROKER_ROLES) - {"client"}
