"""A trainer's tensors that do not all arrive. Those that do are in ``tests/pipeline/test_weights.py``."""

import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from penstock.client.weights import _header
from penstock.infra.model.modeldir import TINY
from penstock.schemas.fleet import TensorSource
from penstock.workers.kv_transfer import tensors
from penstock.workers.kv_transfer.tensors import TensorsLost, receive

pytestmark = pytest.mark.timeout(60)
PLACED = {"agent": "a", "metadata": "", "kind": "cpu"}
HEADER, SIZE = _header({"a": torch.ones(3, 2)}, {"a": torch.float32})


@pytest.fixture
def store() -> Any:
    library: Any = distributed
    return library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def received(store: Any, folder: Path, stop: threading.Event | None = None) -> None:
    source = TensorSource(1, "gloo", "127.0.0.1", store.port, {"w": 1})
    receive(source, 1, folder, TINY, torch.device("cpu"), stop or threading.Event())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\x02\0\0\0\0\0\0\0{]", "none of a safetensors file"),
        (b"\xff" + HEADER[1:], "says something else"),
        (HEADER.replace(b"[0,24]", b"[4,28]"), "a gap at byte 0"),
    ],
)
def test_a_header_that_is_none_is_refused_before_anything_is_sent(
    store: Any, header: bytes, reason: str, tmp_path: Path
) -> None:
    store.set("header", header)
    with pytest.raises(TensorsLost, match=reason):
        received(store, tmp_path / "next")
    assert not (tmp_path / "next").exists()
    assert reason in store.get("received/1").decode(), "the trainer learns it, too"


def test_a_folder_without_room_is_said_with_its_size(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("header", HEADER)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(TensorsLost, match=r"has room for 0\.0 GB"):
        received(store, tmp_path / "next")


def test_waiting_ends_when_the_worker_stops(store: Any, tmp_path: Path) -> None:
    store.set("header", HEADER)
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    with pytest.raises(TensorsLost, match="this worker stops"):
        received(store, tmp_path / "next", stop)
    timer.join()


def test_waiting_for_others_is_bounded(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set("header", HEADER)
    monkeypatch.setattr(tensors, "JOIN_S", 0.3)
    with pytest.raises(TensorsLost, match=r"not all have joined within 0\.3 s"):
        received(store, tmp_path / "next")


@pytest.mark.parametrize("stops", [False, True])
def test_an_address_that_accepts_and_is_silent_holds_the_worker_no_longer(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "STUCK_S", 60.0 if stops else 0.3)
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set if stops else lambda: None)
    timer.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = TensorSource(1, "gloo", "127.0.0.1", silent.getsockname()[1], {"w": 1})
        with pytest.raises(TensorsLost, match="this worker stops" if stops else r"nothing has moved for 0\.3 s"):
            receive(source, 1, tmp_path / "next", TINY, torch.device("cpu"), stop)
        silent.accept()[0].close()
    timer.join()
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize("ranges", [[[1 << 40, 1 << 60, 0], [0, 24 - (1 << 60), 0]], [[-1, 24, 0]]])
def test_places_of_tensors_that_are_none_are_refused(
    store: Any, ranges: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent:
        def __init__(self, *_: Any) -> None: ...

        add = close = post = lambda self, *_: None

    monkeypatch.setattr("penstock.workers.kv_transfer.nixl.load", lambda: None)
    monkeypatch.setattr("penstock.workers.kv_transfer.nixl.NixlAgent", Agent)
    for key, value in (("header", HEADER), ("go", b""), ("nixl", json.dumps(PLACED | {"ranges": ranges}))):
        store.set(key, value)
    source = TensorSource(1, "nixl", "127.0.0.1", store.port, {"w": 1})
    with pytest.raises(TensorsLost, match=r"places of its tensors|out of bounds"):
        receive(source, 1, tmp_path / "next", TINY, torch.device("cpu"), threading.Event())


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.integers(0, 5)), max_size=5))
def test_a_header_of_any_tensors_is_one_and_names_all_their_bytes(given: list[tuple[torch.dtype, int]]) -> None:
    made = {f"t{number}": torch.zeros(size, 3, dtype=dtype) for number, (dtype, size) in enumerate(given)}
    header, size = _header(made, {name: each.dtype for name, each in made.items()})
    assert tensors._size(header) == size == sum(each.nbytes for each in made.values())
