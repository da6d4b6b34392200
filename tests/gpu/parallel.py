"""A model over several GPUs: sums over ranks, answers beside those of a CPU, speed, the end of a rank, hand-over.

python -m tests.gpu.parallel [sums] [parity] [equal] [speed] [lost] [handoff] [--width 2] [--shape 8b]
python -m tests.gpu.parallel handoff --widths 4:2,2:4     (eight GPUs)
TRITON_INTERPRET=1 python -m tests.gpu.parallel sums parity --device cpu --only llama     (without GPUs, slowly)

Each engine is in a process of its own with a bound, and what comes behind it runs whatever becomes of it. Half a minute
before its bound it prints where each rank is. ``sums``: microseconds
of one sum within a CUDA graph, by the kernel and by NCCL. ``equal``: answers of the shape in float32 at this width and
on one GPU. ``python -m tests.gpu.widths`` has the rates of hand-over, ``python -m tests.gpu.beside native vllm --width
2`` the table beside vLLM.
"""

import argparse
import contextlib
import faulthandler
import functools
import mmap
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from penstock.infra.process.gc_policy import freeze_loaded
from penstock.schemas.block_hashes import chain, split
from penstock.schemas.transfer import Endpoint
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import EngineError, SequenceRequest
from penstock.workers.engines.native import build as engine_build
from penstock.workers.engines.native import executors
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.parallel import RankGroup
from penstock.workers.engines.native.ranks import EngineRanks, RankLink, RankSockets, serve
from penstock.workers.kv_transfer.ranks import RankTransports, RemoteTransport, serve_transport
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.gpu import beside
from tests.gpu.native import DRAWN, INTERPRETED, answers, ask, drive, profile
from tests.workers.engines.native import models

PARTS = {
    "sums": 60.0,
    "parity": 60.0,
    "equal": 200.0,
    "speed": 240.0,
    "lost": 75.0,
    "handoff": 120.0,
}  # and seconds, at most
OF_SHAPE = ("equal", "speed")  # parts that need its weights
PARITY = ("llama", "qwen3_moe", "gpt_oss", "phi3", "gemma3", "mixtral", "deepseek_v3")
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of 4,096 values
STREAMS = ((1, 512, 128), (32, 512, 128), (128, 512, 128), (256, 512, 128), (16, 2048, 1))
FEW = 4  # rows of sums by the kernel, interpreted
CHOICE = Path(tempfile.gettempdir(), "penstock-sums")  # MiB up to which the kernel was faster
MAPPED: list[mmap.mmap] = []  # for as long as the process runs


# -- ranks whose kernels are interpreted ---------------------------------------------------------------------------


@contextlib.contextmanager
def interpreted(rank_file: Path) -> Iterator[None]:
    """Kernels on a CPU by Triton's interpreter, in this rank's process; the ranks share the memory of a file."""
    from penstock.workers.engines.native.cuda.rewrite import prepare

    def prepared(model: Any, reload: Any, *, invariant: bool = False) -> executors.PreparedModel:
        if model.group is not None:
            model.group.peers = shared(rank_file, model.group, model.forward.config.hidden_size, model.dtype)
        return executors.PreparedModel(model, prepare(model, invariant=invariant))

    with mock.patch.object(engine_build, "prepared", prepared):
        yield


def shared(file: Path, group: RankGroup, columns: int, dtype: torch.dtype) -> Any:
    """``peers.connect`` over memory that processes share."""
    from penstock.workers.engines.native.cuda import peers

    row_bytes = max(peers.LEAST_ROW, columns * dtype.itemsize)
    size = peers.memory_bytes(group.size, FEW, row_bytes)
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), size * group.size)
    MAPPED.append(mapped)
    peers.AT_ONCE = FEW // 2  # so that rows are taken in turn, too
    base = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    bases = [base + rank * size for rank in range(group.size)]
    return peers.PeerSums(group.rank, bases, FEW, row_bytes, torch.device("cpu"))


def follow(steps: int, transfers: int, rank_file: Path, asked: argparse.Namespace) -> None:
    """As ``penstock.workers.run_rank``."""
    links = [RankLink(socket.socket(fileno=each)) for each in (steps, transfers)]

    def built(pools: Any) -> None:
        threading.Thread(target=serve_transport, args=(links[1], pools, open_transport), daemon=True).start()
        freeze_loaded()

    with interpreted(rank_file) if INTERPRETED else adjusted(asked):
        status = serve(links[0], engine_build.build_follower, built)
    os._exit(status)


@contextlib.contextmanager
def adjusted(asked: argparse.Namespace) -> Iterator[None]:
    """All sums by NCCL, or larger ones by the kernel, if asked for."""
    patch: Any = contextlib.nullcontext()
    if asked.nccl:
        patch = mock.patch("penstock.workers.engines.native.cuda.peers.connect", return_value=None)
    elif asked.most_mib:
        patch = mock.patch.dict(
            "penstock.workers.engines.native.cuda.peers.MOST_BYTES", {asked.width: asked.most_mib << 20}
        )
    with patch:
        yield


@contextlib.contextmanager
def made(
    folder: Path,
    asked: argparse.Namespace,
    started: list[Any] | None = None,
    lost: Callable[[EngineError], None] = print,
    **more: Any,
) -> Iterator[Any]:
    """An engine over ``asked.width`` ranks."""
    with tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        file.truncate(1 << 26)

        def start(ends: RankSockets) -> Any:
            numbers = [str(end.fileno()) for end in ends]
            command = [sys.executable, "-m", "tests.gpu.parallel", "--follow", *numbers, file.name,
                       "--dump-s", str(asked.dump_s), "--width", str(asked.width), "--most-mib", str(asked.most_mib),
                       *(["--nccl"] if asked.nccl else [])]  # fmt: skip
            process = subprocess.Popen(command, pass_fds=[int(each) for each in numbers])
            if started is not None:
                started.append(process)
            return process

        stack.enter_context(interpreted(Path(file.name)) if INTERPRETED else adjusted(asked))
        stack.enter_context(mock.patch.object(engine_build, "EngineRanks", functools.partial(EngineRanks, start=start)))
        width = more.pop("width", asked.width)
        options: dict[str, Any] = {"device": asked.device, "tensor_parallel_size": width} | more
        engine = build(str(folder), NativeOptions(**options), lost=lost)
        try:
            yield engine
        finally:
            began = time.perf_counter()
            engine.close()
            print(f"closed in {time.perf_counter() - began:.2f} s", flush=True)


# -- sums ------------------------------------------------------------------------------------------------------


def sums(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shared").write_bytes(bytes(1 << 26) if INTERPRETED else b"")
        command = [sys.executable, "-m", "tests.gpu.parallel", "--width", str(asked.width), "--device", asked.device]
        ranks = [subprocess.Popen([*command, "--sum", str(rank), folder]) for rank in range(asked.width)]
        for each in ranks:
            if each.wait():
                print(f"sums: a rank ended with status {each.returncode}")


def sum_rank(rank: int, folder: Path, asked: argparse.Namespace) -> None:
    from penstock.workers.engines.native.cuda import peers
    from penstock.workers.engines.native.cuda.modules import RmsNorm

    device = torch.device(asked.device, rank) if asked.device == "cuda" else torch.device("cpu")
    dtype, columns = (torch.bfloat16, 4096) if asked.device == "cuda" else (torch.float32, 96)
    if asked.device == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(rank, asked.width, lambda: FileStore(str(folder / "store"), asked.width))
    group.connect(device)
    began = time.perf_counter()
    found = shared(folder / "shared", group, columns, dtype) if INTERPRETED else peers.connect(
        group, columns, dtype, device, ROWS[-1] * columns * dtype.itemsize
    )  # fmt: skip
    if found is None:
        print(f"rank {rank}: no memory of peers; NCCL alone", flush=True)
    elif not rank:
        print(f"memory of peers in {time.perf_counter() - began:.2f} s, sums of up to {found.rows} rows", flush=True)
    norm = RmsNorm(torch.rand(columns, device=device).to(dtype), 1e-6, 0)
    generator = torch.Generator(device=device).manual_seed(rank)
    same = torch.Generator(device=device).manual_seed(99)
    if found is not None:
        for count in (1, 2, 3, *((200, found.rows) if not INTERPRETED else (FEW,))):
            for _ in range(5):
                part = torch.randn((count, columns), generator=generator, device=device).to(dtype)
                residual = torch.randn((count, columns), generator=same, device=device).to(dtype)
                expected = group.add_up(part.double()) + residual.double()
                out = found.add_up(part, residual, norm)
                normal = norm(out)
                norm.given = None
                error = float((out.float() - expected).norm() / expected.norm())
                wrong = float((normal.float() - norm(out).float()).norm() / normal.float().norm())
                every = group.join(out.reshape(-1))
                bits = all(torch.equal(each, out.reshape(-1)) for each in every.chunk(group.size, -1))
                if error > 1e-2 or wrong > 1e-2 or not bits:
                    print(f"rank {rank}, {count} rows: error {error:.1e}, of the norm {wrong:.1e}, "
                          f"same bits {bits}   WRONG", flush=True)  # fmt: skip
        for size in (2, 513, 1026, 2050):
            numbers = torch.randint(0, 1 << 30, (size,), generator=generator, device=device, dtype=torch.int32)
            expected_numbers = numbers.clone() if not rank else torch.zeros_like(numbers)
            group.add_up(expected_numbers)
            found.spread(numbers)
            if not torch.equal(numbers, expected_numbers):
                print(f"rank {rank}: {size} spread integers differ   WRONG", flush=True)
        print(f"rank {rank}: sums and spread integers were compared", flush=True)
    if asked.device == "cpu":
        return
    best, faster = 0, found is not None
    for count in ROWS:
        took = sum_times(count, columns, group, found, norm, device)
        line = ", ".join(f"{name} {us:.1f}" for name, us in took.items())
        if not rank:
            print(f"sum of {count} x {columns} ({count * columns * 2 >> 10} KiB), us: {line}", flush=True)
        faster = faster and took["with both"] < 0.95 * took["and residual and norm"]
        best = count * columns * 2 >> 20 if faster else best
    if not rank and best:
        CHOICE.write_text(str(max(4, best)))
    if found is not None and found.stopped:
        print(f"rank {rank}: a rank was given up   WRONG", flush=True)
    numbers = torch.zeros(1026, dtype=torch.int32, device=device)
    if found is not None:
        from tests.gpu.times import timed

        spread_us = timed(lambda: [found.spread(numbers) for _ in range(16)], 16) * 1e3
        if not rank:
            print(f"spread of {len(numbers)} integers: {spread_us:.1f} us", flush=True)
    torch.cuda.synchronize()
    group.least(1, device)
    os._exit(0)


def sum_times(
    count: int, columns: int, group: RankGroup, found: Any, norm: Any, device: torch.device
) -> dict[str, float]:
    from tests.gpu.times import timed

    part, residual = (torch.randn((count, columns), device=device, dtype=torch.bfloat16) for _ in range(2))

    def with_norm() -> None:
        group.add_up(part)
        residual.add_(part)
        norm(residual)

    def fused() -> None:
        found.add_up(part, residual, norm)
        norm.given = None

    ways: dict[str, Callable[[], object]] = {"NCCL": lambda: group.add_up(part), "and residual and norm": with_norm}
    if found is not None and count <= found.rows:
        ways |= {"kernel": lambda: found.add_up(part), "with both": fused}
    return {name: timed(lambda call=way: [call() for _ in range(16)], 16) * 1e3 for name, way in ways.items()}


# -- answers ---------------------------------------------------------------------------------------------------


def parity(asked: argparse.Namespace) -> None:
    """Of the model ``asked.only``."""
    if asked.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    name, warm = asked.only, asked.device == "cuda" and not asked.eager
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(name, Path(folder))
        options: dict[str, Any] = {
            "dtype": "float32", "kv_blocks": 200, "block_size": 8, "max_running": 8, "max_batched_tokens": 96,
        }  # fmt: skip
        samplings = DRAWN[:1] if INTERPRETED else DRAWN
        plain = build(str(path), NativeOptions(device="cpu", **options))
        expected = [answers(plain, models.VOCAB, sampling) for sampling, _ in samplings]
        plain.close()
        began = time.perf_counter()
        with made(path, asked, warm=warm, **options) as engine:
            kind = type(engine.ahead or engine.executor).__name__
            print(f"{name}: {kind} after {time.perf_counter() - began:.0f} s", flush=True)
            for (sampling, text), wanted in zip(samplings, expected, strict=True):
                began = time.perf_counter()
                found = answers(engine, engine.info.vocab_size, sampling)
                alike = sum(found[key] == wanted[key] for key in wanted)
                print(f"{name}, width {asked.width}, {'graphs' if warm else 'eager'}, {text}: {alike} of "
                      f"{len(wanted)} answers equal the CPU's ({time.perf_counter() - began:.1f} s)"
                      + ("" if alike == len(wanted) else "   <--"), flush=True)  # fmt: skip


def equal(asked: argparse.Namespace) -> None:
    """Greedy answers of the shape in float32, at this width and on one GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    vocab = beside.SHAPES[asked.shape][0]
    options: dict[str, Any] = {"dtype": "float32", "kv_blocks": 600, "max_running": 16, "max_batched_tokens": 2048}
    found = []
    for width in (1, asked.width):
        with made(
            asked.folder, asked, width=width, warm=asked.device == "cuda" and not asked.eager, **options
        ) as engine:
            tokens: dict[Any, list[int]] = {}
            for request in ask(8, 200, 48, vocab, 5):
                engine.submit(request)
            for result in models.drain(engine):
                for output in result.outputs:
                    tokens.setdefault(output.key, []).append(output.token)
            found.append(tokens)
    alike = sum(found[0][key] == found[1][key] for key in found[0])
    print(f"{asked.shape} in float32: {alike} of {len(found[0])} answers of 48 tokens at width {asked.width} equal "
          f"those of one GPU" + ("" if alike == len(found[0]) else "   <--"), flush=True)  # fmt: skip


# -- speed -----------------------------------------------------------------------------------------------------


def speed(asked: argparse.Namespace) -> None:
    vocab = beside.SHAPES[asked.shape][0]
    sizes: dict[str, Any] = {
        "max_running": beside.RUNNING,
        "max_batched_tokens": beside.BATCHED,
        "max_model_len": beside.longest,
    }
    began = time.perf_counter()
    with made(asked.folder, asked, warm=not asked.eager, **sizes) as engine:
        kind, ready = type(engine.ahead or engine.executor).__name__, time.perf_counter() - began
        freeze_loaded()
        print(f"{asked.shape}, width {asked.width}: ready in {ready:.1f} s, {engine.info.total_blocks} blocks, {kind}",
              flush=True)  # fmt: skip
        for number, (streams, prompt, answer) in enumerate(STREAMS):
            drive(engine, ask(min(streams, 8), prompt, 2, vocab, 100 + number))
            runs = (drive(engine, ask(streams, prompt, answer, vocab, 1000 * attempt + number)) for attempt in (1, 2))
            seconds, first, _, times = min(runs, key=lambda run: run[0])
            steps = sorted(times[-answer // 2 :])
            tokens = streams * (answer if answer > 1 else prompt)
            print(f"{streams} x {prompt} -> {answer}: {tokens / seconds:,.0f} tokens/s, first token "
                  f"{first * 1e3:.1f} ms, step p50 {steps[len(steps) // 2] * 1e3:.2f} ms", flush=True)  # fmt: skip
        if not asked.quick:
            profile(engine)


# -- the end of a rank, and hand-over ----------------------------------------------------------------------------


def lost(asked: argparse.Namespace) -> None:
    """A rank is killed in mid-answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = models.save("llama", Path(folder))
        ended: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
        started: list[Any] = []
        options: dict[str, Any] = {"warm": asked.device == "cuda", "kv_blocks": 200, "max_running": 8}
        with made(path, asked, started, ended.put, **options) as engine:
            engine.submit(models.request(0, models.prompt(9), 400))
            for _ in range(20):
                engine.step()
            began = time.perf_counter()
            started[0].kill()
            try:
                while engine.has_work():
                    engine.step()
                print("no step has failed   WRONG")
            except EngineError as error:
                took = time.perf_counter() - began
                print(f"step failed after {took:.2f} s: {type(error).__name__}: {error}", flush=True)
            print(f"reported: {ended.get(timeout=5)}", flush=True)


def handoff(asked: argparse.Namespace) -> None:
    """A prompt computed at one width is continued at another, over NIXL."""
    with tempfile.TemporaryDirectory() as folder:
        path = models.save("llama", Path(folder))
        words = models.prompt(30)
        options: dict[str, Any] = {"dtype": "float32", "block_size": 8, "kv_blocks": 64, "max_running": 8}
        with two(path, asked, options) as pair:
            first, again, (count, took) = pair.hand_over(words, 12)
            pair.target.submit(again)
            answer = [first, *(output.token for result in models.drain(pair.target) for output in result.outputs)]
        alike = answer == models.expected(path, words, 12)
        print(f"width {asked.only}: {count} bytes in {took * 1e3:.1f} ms, answer {'equal' if alike else 'DIFFERS'}",
              flush=True)  # fmt: skip


class Pair(NamedTuple):
    """An engine in another process, which computes prompts, and one here, which continues them."""

    source: Connection
    target: ScheduledEngine
    reader: RankTransports
    owner: Endpoint

    def hand_over(self, words: tuple[int, ...], count: int) -> tuple[int, SequenceRequest, tuple[int, float]]:
        """The first token, the request that continues it, and the bytes moved with the seconds that this took."""
        from tests.workers.engines.native.test_handoff import ROOT

        self.source.send(words)
        digests = split(chain(pack_tokens(array("I", words)), self.target.info.block_size, ROOT))
        assert self.target.kv_transfer is not None
        reservation = self.target.kv_transfer.reserve(digests, 1, 1)
        assert reservation is not None
        into = reservation.blocks + reservation.tails
        blocks, generations, first = self.source.recv()
        began = time.perf_counter()
        size = self.reader.read(self.owner, "kv", blocks, into[: len(blocks)], generations=generations).result(20).bytes
        took = time.perf_counter() - began
        self.target.kv_transfer.adopt(reservation)
        more: dict[str, Any] = {"digests": digests, "generated": [first], "reservation": reservation}
        return first, models.request(0, words, count, root=ROOT, **more), (size, took)


def transport(engine: ScheduledEngine, name: str) -> RankTransports:
    others = [RemoteTransport(link, f"{name}:{at}", print, 5.0) for at, link in enumerate(engine.transfers)]
    return RankTransports(open_transport("nixl", name, engine.memory()), others)


@contextlib.contextmanager
def two(folder: Path, asked: argparse.Namespace, options: dict[str, Any]) -> Iterator[Pair]:
    """Engines of the widths ``asked.only``, on GPUs of their own if there are enough."""
    first, second = map(int, asked.only.split(":"))
    if asked.device == "cuda" and torch.cuda.device_count() >= first + second:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first)))
        theirs = ",".join(map(str, range(first, first + second)))
    else:
        theirs = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    owner = context.Process(target=own, args=(other, folder, asked, first, options), daemon=False)
    owner.start()
    other.close()
    if theirs:
        os.environ["CUDA_VISIBLE_DEVICES"] = theirs
    try:
        with made(folder, asked, width=second, **options) as target:
            reader = transport(target, f"reader{second}")
            yield Pair(pipe, target, reader, pipe.recv())
            reader.close()
    finally:
        pipe.close()
        owner.join(20)


def own(pipe: Connection, folder: Path, asked: argparse.Namespace, width: int, options: dict[str, Any]) -> None:
    """The process that computes prompts, until the pipe is closed."""
    from tests.workers.engines.native.test_handoff import ROOT, prefilled

    with made(folder, asked, width=width, **options) as source:
        owner = transport(source, f"owner{width}")
        pipe.send(owner.endpoint)
        with contextlib.suppress(EOFError):
            while True:
                pinned, first = prefilled(source, models.request(0, pipe.recv(), 1, root=ROOT))
                pipe.send((pinned.blocks, pinned.generations, first))
        owner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--width", type=int, default=2, help="GPUs that share each layer")
    parser.add_argument("--widths", default="2:1,1:2", metavar="FROM:TO,...", help="of handoff")
    parser.add_argument("--shape", choices=beside.SHAPES, default="8b", help=f"of {', '.join(OF_SHAPE)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="parity: models whose name has this")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--nccl", action="store_true", help="all sums by NCCL")
    parser.add_argument("--most-mib", type=int, default=0, help="of a sum by the kernel; 0: as it is, or by ``sums``")
    parser.add_argument("--folder", type=Path, help="of the weights, kept for later calls; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="speed: without a profile")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts")
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    parser.add_argument("--dump-s", type=float, default=0.0, help="print where each rank is after so long; 0: never")
    parser.add_argument("--sum", nargs=2, metavar=("RANK", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--follow", nargs=3, metavar=("STEPS", "TRANSFERS", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if asked.dump_s:
        faulthandler.dump_traceback_later(asked.dump_s)
    if asked.follow:
        follow(int(asked.follow[0]), int(asked.follow[1]), Path(asked.follow[2]), asked)
    elif asked.sum:
        sum_rank(int(asked.sum[0]), Path(asked.sum[1]), asked)
    elif asked.here:
        parts: dict[str, Callable[[argparse.Namespace], None]] = {
            "sums": sums, "parity": parity, "equal": equal, "speed": speed, "lost": lost, "handoff": handoff,
        }  # fmt: skip
        try:
            parts[asked.parts[0]](asked)
        except Exception:
            traceback.print_exc(limit=-8)
        sys.stdout.flush()
        os._exit(0)
    else:
        whole(asked)


def whole(asked: argparse.Namespace) -> None:
    """Each part in processes of its own."""
    until = time.monotonic() + 60 * asked.minutes
    kept, parts = asked.folder, asked.parts or list(PARTS)
    writer: subprocess.Popen[bytes] | None = None
    try:
        for part in parts:
            if set(OF_SHAPE) & set(parts) and part != "sums" and writer is None:  # meanwhile parts without times run
                asked.folder = kept or beside.place(asked.shape)
                command = [sys.executable, "-m", "tests.gpu.beside", "native", "--write", "--shape", asked.shape,
                           "--folder", str(asked.folder)]  # fmt: skip
                writer = subprocess.Popen(command)
            parity_of = [each for each in PARITY if asked.only in each]
            names = {"parity": parity_of, "handoff": asked.widths.split(",")}
            for name in names.get(part, [""]):
                print(f"== {part} {name}", flush=True)
                began = time.monotonic()
                if part in OF_SHAPE and writer is not None:
                    writer.wait(timeout=120)
                    print(f"weights written {time.monotonic() - began:.0f} s later", flush=True)
                run_part(
                    part, name, asked, min(PARTS[part], until - time.monotonic()) if asked.device == "cuda" else 600.0
                )
                if part == "sums" and CHOICE.exists():
                    asked.most_mib = int(CHOICE.read_text())
                    print(f"the kernel is used for sums of up to {asked.most_mib} MiB")
                print(f"== {part} {name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        if writer is not None:
            writer.kill()
            writer.wait()
        if kept is None and asked.folder is not None:
            shutil.rmtree(asked.folder, ignore_errors=True)


def run_part(part: str, name: str, asked: argparse.Namespace, seconds: float) -> None:
    if seconds < 5:
        print("no time is left")
        return
    flags = [f"--{each}" for each in ("eager", "nccl", "quick") if getattr(asked, each)]
    command = [sys.executable, "-m", "tests.gpu.parallel", part, "--here", "--width", str(asked.width),
               "--shape", asked.shape, "--device", asked.device, "--folder", str(asked.folder), "--only", name,
               "--dump-s", str(max(1.0, seconds - 30)), "--most-mib", str(asked.most_mib), "--widths", asked.widths,
               *flags]  # fmt: skip
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            if process.wait(seconds):
                print(f"{part} ended with status {process.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{part} was ended after {seconds:.0f} s", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
