"""Engines on the stand-in."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import standins
from tests.workers.engines.contract import ALL, Driver, inner, made

(SUBJECT,) = (subject for subject in ALL if subject.name == "sglang")
NIXL = standins.FOLDER / "sglang" / "_standin" / "path"
Make = Callable[..., Driver]


@pytest.fixture(scope="package", autouse=True)
def standin() -> Iterator[None]:
    if standins.real("sglang"):
        pytest.skip("reaches into the stand-in")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with standins.installed():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("SGLANG_STANDIN_KV", str(tmp_path))
    monkeypatch.syspath_prepend(NIXL)
    with contextlib.ExitStack() as open_ones:
        yield lambda **options: open_ones.enter_context(made(SUBJECT, **options))


def scheduler(driver: Driver, rank: int = 0) -> Any:
    return inner(driver).tokenizer_manager.schedulers[rank]
