"""Prefill on one GPU, decode on another, an 8B-shaped Llama with random weights: run by hand on two NVIDIA GPUs.

    pip install nixl-cu13==1.5.1        (or nixl-cu12, as torch's CUDA is)
    python -m tests.gpu.split --json split.json        (--by-layers: read while the last layers are computed)

Two processes with a native engine each. The first computes a prompt, holds its blocks and tells the second which they
are; the second reserves blocks, reads them over NIXL, adopts them and goes on. Measured from the end of the prefill
step: when the blocks have arrived, when the first decode step begins, when it ends. A pipe stands for the broker,
whose part (a stored message, delivered) is measured elsewhere. The answer must be that of one engine alone.

With ``--by-layers``, the first tells each time it has written the KV of more layers, and the second reads these at
once. Afterwards it reads all blocks again, as a whole: the bytes must be the same.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.transfer import Endpoint
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import PinnedPrompt, SequenceRequest, StepResult
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.kv_transfer.transport_protocol import Transport
from penstock.workers.kv_transfer.transport_thread import open_transport

PROMPT, BLOCK, NEW = 4096, 32, 16
ROOT = root("gpu")
SHAPE = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
    eos_token_id=128_001,
)


class Written(NamedTuple):
    """So many leading layers of a prompt's blocks are written; 0: all."""

    at: float
    layers: int
    blocks: list[int]
    generations: list[int]


class Stepped(Protocol):
    def step(self) -> StepResult: ...
    def has_work(self) -> bool: ...


def engine(folder: Path, device: int) -> ScheduledEngine:
    """The 8B-shaped model with the same random weights on every GPU."""
    torch.cuda.set_device(device)

    def made(*_: Any, **__: Any) -> Any:
        torch.manual_seed(1)
        config = LlamaConfig.from_pretrained(folder)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
            torch.set_default_dtype(torch.float32)
        return model, {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": []}

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", made):
        return build(str(folder), NativeOptions(block_size=BLOCK, kv_blocks=1024, device="cuda", dtype="bfloat16"))


def prompt(number: int) -> list[int]:
    return torch.randint(16, 128_000, (PROMPT,), generator=torch.Generator().manual_seed(number)).tolist()


def request(key: object, tokens: list[int], new: int, **more: Any) -> SequenceRequest:
    stop = Stop(max_tokens=new, ignore_eos=True)
    return SequenceRequest(key, tokens, Sampling(temperature=0.0), stop, root=ROOT, **more)


def finish(made: ScheduledEngine, asked: SequenceRequest) -> tuple[list[int], list[Any]]:
    """All tokens of one sequence, and what it left held."""
    made.submit(asked)
    tokens, pinned = [], []
    while made.has_work():
        result = made.step()
        tokens += [output.token for output in result.outputs]
        pinned += result.pinned
    return tokens, pinned


def first_result(made: Stepped) -> StepResult:
    """The result of the first step. On CUDA a call launches a step, and the next call returns what came of it."""
    result = made.step()
    while not result.computed_tokens and made.has_work():
        result = made.step()
    return result


def _prefill(pipe: Connection, folder: Path) -> None:
    made = engine(folder, 0)
    transport = open_transport("nixl", f"prefill-{time.time_ns()}", made.memory())
    finish(made, request("warm", prompt(10_000), 1))
    pipe.send(transport.endpoint)

    def written(prompts: list[PinnedPrompt], layers: int) -> None:
        pipe.send(Written(time.monotonic(), layers, prompts[0].blocks, prompts[0].generations))

    while (order := pipe.recv()) is not None:
        number, by_layers = order
        made.kv_transfer.prompts_written = written if by_layers else None
        began = time.monotonic()
        tokens, pinned = finish(made, request(number, prompt(number), 1, pin=True))
        pipe.send((time.monotonic(), time.monotonic() - began, tokens, pinned[0].blocks, pinned[0].generations))
        pipe.recv()
        made.release_pinned(number)
    transport.close()
    made.close()


def read_by_layers(
    pipe: Connection, transport: Transport, peer: Endpoint, into: list[int]
) -> tuple[Any, dict[str, Any]]:
    """Read what the other engine says that it has written, until its step ends; its message then, and when it was."""
    done, moved, times = 0, 0, dict[str, float]()
    while isinstance(message := pipe.recv(), Written):
        if done == SHAPE.num_hidden_layers:  # all are here: reported once more behind the step
            continue
        end, heard = message.layers or SHAPE.num_hidden_layers, time.monotonic()
        generations = message.generations if end == SHAPE.num_hidden_layers else ()
        part = transport.read(peer, "kv", message.blocks, into, layers=(done, end), generations=generations).result()
        name = "last" if end == SHAPE.num_hidden_layers else "leading"
        times |= {f"{name}_written": message.at, f"{name}_told": heard, f"{name}_arrived": time.monotonic()}
        done, moved = end, moved + part.bytes
    assert done == SHAPE.num_hidden_layers
    assert moved == len(into) * peer.pools["kv"].block_bytes
    ended = message[0]
    return message, {f"{name}_ms": (at - ended) * 1e3 for name, at in times.items()}


def same_bytes(made: ScheduledEngine, transport: Transport, peer: Endpoint, read: list[int], message: Any) -> None:
    """Compare blocks that were read by layers with the same as they are now, read as a whole."""
    blocks, generations = message[3:]
    names = split(chain(pack_tokens(prompt(20_000)), BLOCK, ROOT))[: len(read)]
    whole = made.kv_transfer.reserve(names, 0, 1)
    assert whole is not None
    transport.read(peer, "kv", blocks, whole.blocks, generations=generations).result()
    executor = made.executor if made.executor is not None else made.ahead
    data: torch.Tensor = executor.pool.data  # type: ignore[union-attr]
    assert data[read].any(), "there are no bytes to compare"
    assert torch.equal(data[read].view(torch.uint8), data[whole.blocks].view(torch.uint8)), "other bytes than there"
    made.kv_transfer.release(whole)


def measure(rounds: int, folder: Path, *, by_layers: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_prefill, args=(other, folder), daemon=True)
    process.start()
    made = engine(folder, 1 if torch.cuda.device_count() > 1 else 0)
    transport = open_transport("nixl", f"decode-{time.time_ns()}", made.memory())
    finish(made, request("warm", prompt(10_001), NEW))
    assert pipe.poll(300)
    peer = pipe.recv()
    transport.connect(peer).result()
    rows = []
    for number in range(rounds + 2):
        tokens = prompt(number)
        digests = split(chain(pack_tokens(tokens), BLOCK, ROOT))
        reservation = made.kv_transfer.reserve(digests, 0, 1)
        assert reservation is not None
        pipe.send((number, by_layers))
        if by_layers:
            message, times = read_by_layers(pipe, transport, peer, reservation.blocks)
            ended, prefill_s, first, *_ = message
        else:
            ended, prefill_s, first, blocks, generations = pipe.recv()
            heard = time.monotonic()
            moved = transport.read(peer, "kv", blocks, reservation.blocks, generations=generations).result()
            arrived = time.monotonic()
            times = {
                "told_ms": (heard - ended) * 1e3,
                "arrived_ms": (arrived - ended) * 1e3,
                "transfer_gb_per_s": moved.bytes / moved.seconds / 1e9,
            }
        begins = time.monotonic()
        reservation_blocks = list(reservation.blocks)
        made.kv_transfer.adopt(reservation)
        made.submit(request(number, tokens, NEW, generated=first, reservation=reservation))
        result = first_result(made)
        ends = time.monotonic()
        assert result.computed_tokens == 1, "nothing of the prompt is computed here"
        answer = [*first, result.outputs[0].token]
        steps = []
        while made.has_work():
            at = time.monotonic()
            answer += [output.token for output in made.step().outputs]
            steps.append(time.monotonic() - at)
        if by_layers:
            same_bytes(made, transport, peer, reservation_blocks, message)
        pipe.send("taken")
        if number == 0:  # alone: another salt, so that nothing is found in the cache
            alone, _ = finish(
                made,
                SequenceRequest("alone", tokens, Sampling(temperature=0.0), Stop(NEW, ignore_eos=True), root=root("x")),
            )
            same = sum(a == b for a, b in zip(answer, alone, strict=True))
        if number > 1:
            rows.append(
                {
                    "prefill_ms": prefill_s * 1e3,
                    **times,
                    "first_step_begins_ms": (begins - ended) * 1e3,
                    "first_step_ends_ms": (ends - ended) * 1e3,
                    "decode_step_ms": statistics.median(steps) * 1e3,
                }
            )
    pipe.send(None)
    process.join(60)
    transport.close()
    figures = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return figures | {"equal_tokens": f"{same} of {NEW}", "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path("8b-shaped"))
    parser.add_argument("--by-layers", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    SHAPE.num_hidden_layers = options.layers
    SHAPE.save_pretrained(options.folder)
    figures = measure(options.rounds, options.folder, by_layers=options.by_layers)
    print(json.dumps(figures, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
