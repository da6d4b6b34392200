"""KV blocks in host memory, on real models."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native.build import _page_locked, build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.properties import some
from tests.workers.engines.native.models import drain, expected, prompt, request, run, tokens

MIB = 1 / 1024  # GiB


WINDOWED = ("gemma2", "gemma3", "gpt_oss", "mistral")  # soft caps; plain; sinks; sliding layers only


@pytest.mark.parametrize("name", some(["llama", "deepseek_v2", *WINDOWED], "deepseek_v2", "gemma3"))
def test_prompts_that_left_the_pool_are_found_again_with_their_kv(name: str, model_dir: Callable[[str], Path]) -> None:
    directory = model_dir(name)
    options = NativeOptions(device="cpu", block_size=8, kv_blocks=14, kv_offloading_size=4 * MIB)
    native = build(str(directory), options)
    assert (native.scheduler.kv_cache.windows is not None) == (name in WINDOWED)
    for salt in range(5):
        requests = [request(salt, prompt(60, salt), 20)]
        assert tokens(run(native, requests))[salt] == expected(directory, prompt(60, salt), 20)
    native.submit(request("again", prompt(60, 0), 20))
    results = drain(native)
    assert [start.cached_tokens for result in results for start in result.started] == [56]
    answer = [output.token for result in results for output in result.outputs]
    assert answer == expected(directory, prompt(60, 0), 20)
    assert native.stats().loaded_blocks > 0


@pytest.mark.parametrize("registers", [True, False])
def test_page_locked_memory_has_the_bytes_that_were_asked_for(registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would take the next power of two; it does so where a range cannot be registered."""
    taken, made = list[tuple[int, int, int]](), torch.zeros

    def register(address: int, size: int, flags: int) -> int:
        taken.append((address, size, flags))
        return 0 if registers else 801

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", lambda size, *, dtype, pin_memory=False: made(size, dtype=dtype))
    monkeypatch.setattr(torch, "ones", lambda size, *, device: None)
    data, locked = _page_locked((3, 5, 7), torch.bfloat16)
    assert data.shape == (3, 5, 7)
    assert not data.any()
    assert taken[0][1:] == (3 * 5 * 7 * 2, 0)
    assert locked == (taken[0][0] if registers else 0)
    assert (data.data_ptr() == taken[0][0]) == registers


def test_kv_of_other_weights_is_not_found_in_host_memory(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("llama")
    native = build(str(directory), NativeOptions(device="cpu", block_size=8, kv_blocks=14, kv_offloading_size=4 * MIB))
    for salt in range(3):
        run(native, [request(salt, prompt(60, salt), 20)])
    assert native.stats().host_blocks > 0
    assert native.weights is not None
    native.weights.hold()
    native.weights.replace(native.weights.read(directory), lambda key, generated: b"")
    native.weights.proceed()
    assert native.stats().host_blocks == 0
    assert native.dump() == []
    native.submit(request("again", prompt(60, 0), 20))
    assert [start.cached_tokens for result in drain(native) for start in result.started] == [0]


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_kv_as_fp8_is_copied_as_it_is(name: str, model_dir: Callable[[str], Path]) -> None:
    answers = []
    for size in (0.0, 4 * MIB):
        options = NativeOptions(
            device="cpu", block_size=8, kv_blocks=14, kv_offloading_size=size, kv_dtype="fp8", max_batched_tokens=8
        )
        native = build(str(model_dir(name)), options)
        answers.append([tokens(run(native, [request(n, prompt(60, n % 2), 20)]))[n] for n in range(4)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    some(
        [("llama", "auto"), ("llama", "fp8"), ("llama", "bfloat16"), *((name, "auto") for name in WINDOWED)],
        *(("llama", "fp8"), ("gpt_oss", "auto")),
    ),
)
def test_a_prompt_is_found_again_after_a_restart(
    name: str, kv_dtype: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = model_dir(name)
    sizes = {"block_size": 8, "kv_blocks": 14, "kv_offloading_size": 4 * MIB, "max_batched_tokens": 8}
    options = NativeOptions(device="cpu", kv_disk=str(tmp_path), kv_dtype=kv_dtype, **sizes)  # type: ignore[arg-type]
    answers, cached = [], []
    for _ in range(2):
        native = build(str(directory), options)
        native.submit(request("a", prompt(60), 20))
        results = drain(native)
        answers.append([output.token for result in results for output in result.outputs])
        cached += [start.cached_tokens for result in results for start in result.started]
        native.close()
    assert answers[0] == answers[1]
    assert cached == [0, 56]
    other = build(str(directory), dataclasses.replace(options, block_size=4))
    assert other.stats().disk_blocks == 0, "blocks of another layout are not its own"
    other.close()


def test_a_size_below_one_block_is_refused(model_dir: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match="raise kv_offloading_size"):
        build(str(model_dir("llama")), NativeOptions(device="cpu", kv_blocks=14, kv_offloading_size=1e-9))
