"""Where engines publish their KV events, and how they are read."""

from pathlib import Path

import pytest
import zmq

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.external.event_streams import channels, subscribe
from penstock.workers.engines.external.runtime import Inbox


def test_a_single_rank_has_sockets_in_the_folder(tmp_path: Path) -> None:
    assert channels(tmp_path, 1) == (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")


def test_several_ranks_have_ports_in_a_row(tmp_path: Path) -> None:
    events, replay = channels(tmp_path, 4)
    first, second = (int(each.rpartition(":")[2]) for each in (events, replay))
    assert second == first + 4
    assert events.startswith("tcp://127.0.0.1:")


def test_a_folder_whose_path_is_too_long_for_sockets_is_named_with_the_fix() -> None:
    with pytest.raises(EngineError, match=r"t is too long .* set TMPDIR to a shorter folder"):
        channels(Path("/" + "t" * 100), 1)
    longest, _ = channels(Path("/" + "t" * 99), 1)
    with zmq.Context() as context, context.socket(zmq.SUB) as used, pytest.raises(zmq.ZMQError, match="No such file"):
        used.bind(longest)  # as far as its length goes, it can be used


def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    with pytest.raises(EngineError, match="no-such-host"):
        subscribe({"endpoint": "tcp://no-such-host.invalid:x"}, 0, Inbox())
