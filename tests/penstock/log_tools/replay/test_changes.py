"""Recorded requests as new ones."""

import pytest

from penstock.log_tools.replay.comparison import Changes, NamingInputs, as_new, parse_changes
from penstock.schemas import block_hashes
from penstock.schemas.requests import GenerateRequest, Priority
from tests.penstock.log_tools.traces import samples

TARGET = NamingInputs("tiny", "rev-2", 16, "tok")


def changed(request: GenerateRequest, changes: Changes) -> GenerateRequest:
    return as_new(request, "new", "replay-1", samples.T0 * 2, TARGET, changes)


def test_a_request_keeps_what_decides_its_tokens_and_names_its_blocks_as_the_target_does() -> None:
    old = samples.request(worker="w-1", salt="s", form="stream")
    new = changed(old, Changes())
    assert (new.prompt, new.sampling, new.stop, new.salt) == (old.prompt, old.sampling, old.stop, "s")
    assert (new.id, new.gateway, new.client_request_id) == ("new", "replay-1", old.id)
    assert (new.worker, new.form, new.trace) == ("", "", None)
    assert new.digests == block_hashes.chain(old.prompt, 16, block_hashes.root("rev-2", salt="s"))
    assert new.deadline_ns - new.created_ns == old.deadline_ns - old.created_ns


def test_settings_are_changed_by_name() -> None:
    changes = parse_changes(
        ["temperature=0", "max_tokens=5", "n=2", "priority=batch", 'strings=["a"]'], model="m", seed=9, logprobs=2
    )
    new = changed(samples.request(), changes)
    assert (new.sampling.temperature, new.sampling.seed, new.sampling.logprobs) == (0, 9, 2)
    assert (new.stop.max_tokens, new.stop.strings, new.n, new.priority) == (5, ("a",), 2, Priority.batch)
    assert samples.request().sampling.temperature == 0.5


@pytest.mark.parametrize("text", ["temperature", "temperature=hot", "temprature=0", "n=many", "priority=first"])
def test_a_setting_that_does_not_exist_or_has_another_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        parse_changes([text])
