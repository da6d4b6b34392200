"""Sliding windows on a GPU: answers with prefill and decode apart, memory at long contexts, speed beside one pool.

python -m tests.gpu.windows [parity] [memory] [speed] [--shape gemma3|gpt-oss] [--context 65536]
TRITON_INTERPRET=1 python -m tests.gpu.windows parity --device cpu --only gemma3     (without a GPU, slowly)
python -m tests.gpu.windows memory speed --device cpu --shape tiny --context 1500    (without a GPU)

``parity`` compares the kernels' answers to prompts beyond the window, in one engine, handed off to another, and with KV
from host memory, with a draft model, too, with plain torch on a CPU. ``memory`` gives both ways of dividing memory 0.7
of what one pool needs for the context: with one pool the prompt is refused, with two it is answered. ``speed`` compares
both ways.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig

from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.transfer import KV, WINDOWS
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.native.build import assemble, build
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.gpu import beside
from tests.gpu.native import INTERPRETED, ask, drive, interpreted, large
from tests.workers.engines.native import models

ROOT = root("gpu")
BLOCK = 32
FORMS = ("gemma2", "gemma3", "gpt_oss", "mistral")  # soft caps; plain; sinks; sliding layers only
LENGTHS, ANSWER = ((5, 40), 6) if INTERPRETED else ((5, 40, 77, 200), 40)


def config(shape: str, context: int) -> Any:
    """Gemma 3 4B's shape, a tiny one of the same form, or one of ``beside``."""
    if shape not in ("gemma3", "tiny"):
        beside.longest = context
        return beside.config(shape)
    common: dict[str, Any] = {
        "max_position_embeddings": context, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if shape == "tiny":
        return Gemma3TextConfig(vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
                                num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=64,
                                **common)  # fmt: skip
    return Gemma3TextConfig(vocab_size=262_208, hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34,
                            num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024,
                            **common)  # fmt: skip


def weights(asked: argparse.Namespace) -> Any:
    shape = config(asked.shape, asked.context + 256)
    made = large(shape, asked.device)
    if isinstance(shape, Gemma3TextConfig):  # a buffer, which has no random weights
        made.model.embed_tokens.embed_scale.fill_(shape.hidden_size**0.5)
    return made


def handed_off(source: ScheduledEngine, target: ScheduledEngine, words: tuple[int, ...], count: int) -> list[int]:
    """An answer: the first token by one engine, the rest by another in this process, which has read the KV."""
    source.submit(models.request("a", words, 1, root=ROOT, pin=True))
    results = models.drain(source)
    (pinned,) = (each for result in results for each in result.pinned)
    (first,) = (output.token for result in results for output in result.outputs)
    size = source.info.block_size
    digests = split(chain(pack_tokens(array("I", words)), size, ROOT))
    assert target.kv_transfer is not None
    reservation = target.kv_transfer.reserve(digests, int(len(words) % size > 0), 1, len(words))
    assert reservation is not None
    there, here = ((engine._owned.pool, engine._owned._sliding.pool) for engine in (source, target))
    moves = [(pinned.blocks[reservation.have :], (reservation.blocks + reservation.tails)[reservation.have :])]
    window = len(pinned.blocks) - len(pinned.windows.rows)
    moves.append(
        ([pinned.windows.rows[fill.position - window] for fill in reservation.fills],
         [fill.row for fill in reservation.fills])
    )  # fmt: skip
    for theirs, mine, (take, into) in zip(there, here, moves, strict=True):
        if mine.block_bytes and take:
            mine._raw[torch.tensor(into)] = theirs._raw[torch.tensor(take)]
    if here[0].data.is_cuda:
        torch.cuda.synchronize()
    target.kv_transfer.adopt(reservation)
    assert source.release_pinned("a")
    more = {"root": ROOT, "digests": digests, "generated": [first], "reservation": reservation}
    target.submit(models.request("a", words, count, **more))
    results = models.drain(target)
    started = next(result.started[0] for result in results if result.started)
    assert started.cached_tokens == len(words), "a part of the prompt was computed again"
    return [first, *(output.token for result in results for output in result.outputs)]


def parity(asked: argparse.Namespace) -> dict[str, Any]:
    """In float32: answers of the kernels that equal those of plain torch."""
    if asked.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [each for each in FORMS if asked.only in each]:
            path = models.save(name, Path(folder))

            def engine(kernels: bool, path: Path = path, blocks: int = 100, **more: Any) -> ScheduledEngine:
                device = "cuda" if kernels and not INTERPRETED else "cpu"
                options = NativeOptions(
                    device=device, dtype="float32", kv_blocks=blocks, block_size=8, max_running=4,
                    max_batched_tokens=48, warm=device == "cuda", **more,
                )  # fmt: skip
                with interpreted() if kernels and INTERPRETED else contextlib.nullcontext():
                    return build(str(path), options)

            plain, alone, source, target = (engine(kernels) for kernels in (False, True, True, True))
            longest, host = -(-(max(LENGTHS) + ANSWER) // 8) + 4, {"kv_offloading_size": 1 / 64}
            kept = engine(True, blocks=longest, **host)
            drafted = engine(True, blocks=longest, speculative_model=str(path), **host)
            equal = {"alone": 0, "handed off": 0, "from host memory": 0, "drafted, from host memory": 0}
            for length in LENGTHS:
                words = models.prompt(length)
                wanted = models.tokens(models.run(plain, [models.request("a", words, ANSWER)]))["a"]
                here = models.tokens(models.run(alone, [models.request("a", words, ANSWER)]))["a"]
                equal["alone"] += here == wanted
                equal["handed off"] += handed_off(source, target, words, ANSWER) == wanted
                for how, small in (("from host memory", kept), ("drafted, from host memory", drafted)):
                    assert small.scheduler.kv_cache.windows is not None
                    for prompt in (words, models.prompt(max(LENGTHS), salt=1), models.prompt(max(LENGTHS), salt=2)):
                        models.run(small, [models.request("a", prompt, ANSWER)])
                    equal[how] += models.tokens(models.run(small, [models.request("a", words, ANSWER)]))["a"] == wanted
            loaded = [sum(host.loaded_blocks for host in each.scheduler.kv_cache.hosts) for each in (kept, drafted)]
            assert all(loaded), "nothing came back from host memory"
            accepted = drafted.stats().accepted_tokens
            assert accepted, "no proposal was accepted"
            for each in (plain, alone, source, target, kept, drafted):
                each.close()
            found[name] = {how: f"{count} of {len(LENGTHS)} answers equal" for how, count in equal.items()}
            found[name] |= {"loaded blocks and rows": loaded, "accepted tokens": accepted}
            print(name, found[name], flush=True)
    return found


@contextlib.contextmanager
def made(asked: argparse.Namespace, *, hybrid: bool, blocks: int = 0, running: int = 64) -> Iterator[ScheduledEngine]:
    options = NativeOptions(
        device=asked.device, block_size=BLOCK, kv_blocks=blocks, max_running=running, hybrid_kv_cache=hybrid,
        max_model_len=asked.context + 256, kv_memory_fraction=0.0 if blocks else 0.6, warm=asked.device == "cuda",
        max_batched_tokens=min(8192, max(64, asked.context // 8)),
    )  # fmt: skip
    engine = assemble(describe(weights(asked)), options)
    try:
        yield engine
    finally:
        engine.close()
        if asked.device == "cuda":
            torch.cuda.empty_cache()


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    """One prompt as long as the context, in 0.7 of the memory that one pool needs for it."""
    blocks, found = int(asked.context * 0.7) // BLOCK, {}
    vocab = config(asked.shape, asked.context).vocab_size
    for name, hybrid in (("one pool", False), ("two pools", True)):
        with made(asked, hybrid=hybrid, blocks=blocks, running=2) as engine:
            windows = engine.scheduler.kv_cache.windows
            pools = engine._owned.memory()
            row: dict[str, Any] = {"pool bytes": sum(each.blocks * each.block_bytes for each in pools.values())}
            (request,) = ask(1, asked.context, 32, vocab, 7)
            try:
                engine.submit(request)
            except RequestError as error:
                found[name] = row | {"answer": f"refused: {error.message}"}
                print(name, found[name], flush=True)
                continue
            held, tokens = 0, 0
            while engine.has_work():
                tokens += len(engine.step().outputs)
                held = max(held, windows.used_blocks if windows is not None else 0)
            row |= {"answer": f"{tokens} tokens", "rows held, at most": held}
            if windows is not None:
                chunk = -(-engine.scheduler.max_batched_tokens // BLOCK)
                window = held * pools[WINDOWS].block_bytes
                all_layers = -(-asked.context // BLOCK)
                row |= {
                    "rows of a window and a chunk": windows.most_rows + chunk,
                    "bytes held": all_layers * pools[KV].block_bytes + window,
                    "of them for windows": window,
                    "bytes in one pool": all_layers * found["one pool"]["pool bytes"] // blocks,
                }
                assert held <= windows.most_rows + chunk + 1
            found[name] = row
            print(name, found[name], flush=True)
    return found


def speed(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by streams, prompts and answers, each as the median of three."""
    most, answer = (64, 64) if asked.device == "cuda" else (2, 4)
    rows = [(count, asked.context // 2 // count, answer) for count in (1, 8, 64) if count <= most]
    rates: dict[str, dict[str, float]] = {}
    vocab = config(asked.shape, asked.context).vocab_size
    for name, hybrid in (("one pool", False), ("two pools", True)):
        with made(asked, hybrid=hybrid, blocks=0 if asked.device == "cuda" else 400) as engine:
            drive(engine, ask(2, 64, 8, vocab, 99))
            for number, (count, prompt, answer) in enumerate(rows):
                took = [drive(engine, ask(count, prompt, answer, vocab, 10 * turn + number))[0] for turn in range(3)]
                key = f"{count} x {prompt} -> {answer}"
                rates.setdefault(key, {})[name] = round(count * answer / statistics.median(took), 1)
                print(name, key, rates[key][name], "tokens/s", flush=True)
    for each in rates.values():
        each["ratio"] = round(each["two pools"] / each["one pool"], 3)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["parity", "memory", "speed"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("gemma3", "gpt-oss", "tiny"), default="gemma3")
    parser.add_argument("--context", type=int, default=65_536, help="tokens")
    parser.add_argument("--only", default="", help="parity: models whose name has this")
    parser.add_argument("--json", default="", help="write the figures to this file")
    asked = parser.parse_args()
    parts = {"parity": parity, "memory": memory, "speed": speed}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"}
    for what in asked.what:
        began = time.perf_counter()
        found[what] = parts[what](asked)
        print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
    print(json.dumps(found, indent=2))
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
