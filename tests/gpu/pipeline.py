"""An engine through the whole pipeline (HTTP, broker, router, worker), beside the same engine without it, on one GPU.

python -m tests.gpu.pipeline --shape 8b --streams 1,32,128,256 [--engine vllm|sglang] [--profile]

A model with random weights is written to a folder (keep it in memory: /dev/shm), unless it is there. First the native
engine in a process of its own runs so many sequences at a time, a new one for each that ends; with `--engine vllm` or
`sglang`, that engine's own server with the same settings gets the load instead. Then the same load comes to a
deployment over HTTP, from `penstock bench http`. `--profile` needs py-spy.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.infra.model import modeldir
from penstock.launch.state import DeploymentState, read_state
from penstock.measure.load_generator import WORDS

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip
SHAPES = {
    "8b": (128256, 4096, 14336, 32, 32, 8),
    "0.3b": (32768, 1024, 4096, 16, 16, 8),
    "tiny": (4200, 64, 128, 2, 4, 2),
    "kv": (4200, 2048, 2048, 32, 16, 16),  # 262 KB of KV per token
}
LONGEST = 4096
START_S = 220.0
VLLM = {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 8192}
# Kernels that need no package beyond Triton; its default on Hopper, FlashAttention 3, is a library of 1.1 GB.
SGLANG = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.4,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "disable_prefill_cuda_graph": True,
}
PEERS: dict[str, dict[str, Any]] = {"vllm": VLLM, "sglang": SGLANG}
ROOM = 18e9  # bytes of the largest shape, and some


def tokenizer(folder: Path, vocab: int) -> None:
    """The tiny model's tokenizer with a word for every further token, so that each token of an answer has text."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(modeldir.TINY / name, folder)
    made = json.loads((modeldir.TINY / "tokenizer.json").read_text())
    words = made["model"]["vocab"]
    special = {each["id"] for each in made["added_tokens"]}
    words |= {f"Ġw{token}": token for token in range(len(words), vocab) if token not in special}
    (folder / "tokenizer.json").write_text(json.dumps(made))


def make(folder: Path, shape: str) -> Any:
    """Write the model; the same, ready for an engine in this process."""
    import torch
    from transformers import LlamaConfig

    from tests.gpu import native

    config = LlamaConfig(
        **dict(zip(_SIZES, SHAPES[shape], strict=True)),
        max_position_embeddings=2 * LONGEST, rope_theta=500000.0, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=4095, pad_token_id=4093, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    began = time.perf_counter()
    torch.manual_seed(1)
    model = native.large(config, "cuda" if torch.cuda.is_available() else "cpu")
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer(folder, config.vocab_size)
    print(f"{shape}: written in {time.perf_counter() - began:.1f} s", flush=True)
    return model


def alone(asked: argparse.Namespace, folder: Path) -> None:
    """In a process of its own: make the model, run the engine, write its figures."""
    from penstock.infra.process.gc_policy import freeze_loaded
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu import native

    made = make(folder, asked.shape)
    if asked.write:
        return
    began = time.perf_counter()
    engine = assemble(
        describe(made),
        NativeOptions(max_running=asked.max_running, max_model_len=LONGEST, warm=True, kv_blocks=asked.kv_blocks),
    )
    freeze_loaded()
    print(f"engine ready in {time.perf_counter() - began:.1f} s", flush=True)
    rows = [closed_loop(engine, *row, asked, native) for row in zip(asked.streams, asked.generations, strict=True)]
    (folder / "alone.json").write_text(json.dumps(rows))
    engine.close()


def closed_loop(
    engine: Any, streams: int, generations: int, asked: argparse.Namespace, native: Any
) -> dict[str, float]:
    """``streams`` sequences at a time, from the first request to the last answer's end, as `bench http --requests`."""
    made = native.ask(streams * generations, asked.prompt, asked.answer, SHAPES[asked.shape][0], 1000 + streams)
    waiting = iter(made)
    sent: dict[object, float] = {}
    last: dict[object, float] = {}
    first, between = [], []
    began = time.perf_counter()
    for request in itertools.islice(waiting, streams):
        sent[request.key] = time.perf_counter()
        engine.submit(request)
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        for output in result.outputs:
            if output.key in last:
                between.append(now - last[output.key])
            else:
                first.append(now - sent[output.key])
            last[output.key] = now
            if output.finish and (following := next(waiting, None)) is not None:
                sent[following.key] = time.perf_counter()
                engine.submit(following)
    tokens, took = len(made) * asked.answer, time.perf_counter() - began
    first = first[streams:]  # as `bench http`: those of the beginning do not count
    return {
        "streams": streams,
        "tokens_per_s": tokens / took,
        "ttft_p50_ms": of(first, 0.5),
        "ttft_p99_ms": of(first, 0.99),
        "itl_p50_ms": of(between, 0.5),
        "itl_p99_ms": of(between, 0.99),
    }


def of(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else 0.0


def penstock(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "penstock", *map(str, arguments)]


def words_for(folder: Path, tokens: int) -> int:
    """How many words of `bench http` make a prompt of so many tokens, the template's among them."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = len(made.encode(" ".join(WORDS)).ids) / len(WORDS)
    return max(1, round((tokens - 8) / count))


def up(asked: argparse.Namespace, folder: Path, data: Path) -> tuple[subprocess.Popen[bytes], DeploymentState]:
    """Start a deployment; it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    engine = ["--engine", asked.engine]
    if asked.engine in PEERS:
        engine += ["--override-engine-args", json.dumps(PEERS[asked.engine])]
    with (data / "up.log").open("wb") as out:
        process = subprocess.Popen(
            penstock("up", *engine, "--model", folder, "--data-dir", data / "penstock",
                     "--http-port", port, "--gateways", asked.gateways, "--max-running", asked.max_running,
                     "--kv-blocks", asked.kv_blocks, "--max-model-len", LONGEST, "--ready-s", START_S - 10,
                     "--log-format", "json", "--drain-s", 3),
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    while b'"ready"' not in (data / "up.log").read_bytes():
        if process.poll() is not None or time.perf_counter() - began > START_S:
            logs = (data / "up.log").read_text()[-3000:]
            process.kill()
            raise SystemExit(f"penstock up did not get ready:\n{logs}")
        time.sleep(0.1)
    state = read_state(data / "penstock" / "state.json")
    print(f"penstock up ready after {time.perf_counter() - began:.1f} s", flush=True)
    prompt_tokens(state.http_url, state.model, 1)
    print(f"first tokens {time.perf_counter() - began:.1f} s after its start", flush=True)
    return process, state


def peer(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The engine's own server (`vllm serve`, `sglang.launch_server`) under the same load."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began, url, log = time.perf_counter(), f"http://127.0.0.1:{port}", folder.parent / f"{asked.engine}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *served(asked, folder), "--port", str(port), "--dtype", "bfloat16",
             "--served-model-name", "model", *flags(PEERS[asked.engine])],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while not _answers(url + "/health"):
            if process.poll() is not None or time.perf_counter() - began > START_S:
                print(f"the server of {asked.engine} did not get ready:\n", log.read_text()[-3000:])
                return []
            time.sleep(0.2)
        words = words_for(folder, asked.prompt)
        prompt_tokens(url, "model", 1)
        print(f"the server of {asked.engine}: first tokens after {time.perf_counter() - began:.1f} s", flush=True)
        rows = []
        for streams, generations in zip(asked.streams, asked.generations, strict=True):
            bench(asked, log.parent, words, streams, generations, "--url", url).wait(timeout=150)
            rows.append(row_of(log.parent, generations))
        return rows
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def served(asked: argparse.Namespace, folder: Path) -> list[str]:
    """The engine's server, with the sizes that a worker of it has."""
    if asked.engine == "vllm":
        sizes = ["--max-num-seqs", str(asked.max_running), "--max-model-len", str(LONGEST)]
        return ["vllm.entrypoints.cli.main", "serve", str(folder), *sizes]
    sizes = ["--max-running-requests", str(asked.max_running), "--context-length", str(LONGEST), "--page-size", "32",
             "--chunked-prefill-size", "8192"]  # fmt: skip
    return ["sglang.launch_server", "--model-path", str(folder), *sizes]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as words of a command line."""
    words = []
    for name, value in arguments.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def prompt_tokens(url: str, model: str, words: int) -> int:
    """Of a prompt of so many words; asks for two tokens."""
    text = " ".join(random.Random(words).choices(WORDS, k=words))
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens"])


def bench(
    asked: argparse.Namespace, data: Path, words: int, streams: int, generations: int, *where: object
) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        penstock("bench", "http", *where, "--concurrency", streams,
                 "--requests", streams * (generations - 1), "--warm-up-s", 0, "--seed", streams * 100 + generations,
                 "--prompt-words", words, "--shared-prefix", 0, "--output-tokens", asked.answer,
                 "--json", data / "bench.json"),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def row_of(data: Path, generations: int) -> dict[str, Any]:
    """Without a warm-up the first request of each connection is in the time, but not among the requests: add it."""
    (row,) = json.loads((data / "bench.json").read_text())["stages"]
    less = (generations - 1) / generations
    row["tokens_per_s"] /= less
    row["total_cpu_us_per_token"] *= less
    row["cpu_us_per_token"] = {name: cost * less for name, cost in row["cpu_us_per_token"].items()}
    return dict(row)


def profile(asked: argparse.Namespace, state: DeploymentState, data: Path, words: int) -> None:
    """Where worker and gateway spend their time under the heaviest load: functions, with those they called."""
    where = ("--state", data / "penstock" / "state.json")
    load = bench(asked, data, words, max(asked.streams), 3 + asked.generations[-1], *where)
    time.sleep(3)
    for running in state.processes:
        if running.role not in ("worker", "gateway") or not running.pid:
            continue
        raw = data / f"{running.name}.raw"
        done = subprocess.run(
            ["py-spy", "record", "-p", str(running.pid), "-d", "4", "-r", "200", "-f", "raw", "-o", str(raw), "-t",
             "--nonblocking"], capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if not raw.exists():
            print(f"py-spy {running.name}: {done.stderr[-300:]}")
            continue
        summarise(running.name, raw.read_text())
    load.wait(timeout=120)


def summarise(name: str, raw: str) -> None:
    own: Counter[str] = Counter()
    under: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        threads[frames[0]] += int(count)
        own[f"{frames[-1]}"] += int(count)
        under.update({frame: int(count) for frame in set(frames[1:])})
    total = sum(threads.values()) or 1
    print(f"-- {name}: samples by thread:", dict(threads.most_common(4)))
    for title, counts, most in (("own", own, 14), ("with callees", under, 26)):
        print(f"   {title}: " + "; ".join(f"{n / total:.0%} {frame}" for frame, n in counts.most_common(most)))


def table(asked: argparse.Namespace, rows: list[dict[str, Any]], alone_rows: list[dict[str, Any]]) -> None:
    print("| streams | | tokens/s | TTFT p50 | p99 | ITL p50 | p99 (ms) | CPU-µs/token | of them |")
    print("|---|---|---|---|---|---|---|---|---|")
    for streams, bare, row in itertools.zip_longest(asked.streams, alone_rows, rows):
        apart = f"{asked.engine}'s server" if asked.engine in PEERS else f"{asked.engine} alone"
        both = ((f"{asked.shape} {apart}", bare), (f"{asked.shape} {asked.engine} pipeline", row))
        for title, each in both[not bare :]:
            times = " | ".join(f"{each[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"))
            cpu = f"{each['total_cpu_us_per_token']:.0f}" if "errors" in each else ""
            parts = ", ".join(f"{name} {cost:.0f}" for name, cost in each.get("cpu_us_per_token", {}).items())
            print(f"| {streams} | {title} | {each['tokens_per_s']:,.0f} | {times} | {cpu} | {parts} |")
        share = f"{row['tokens_per_s'] / bare['tokens_per_s']:.3f}" if bare else "?"
        print(f"  pipeline / engine: {share}; tokens per event "
              f"{row['tokens_per_event']}; load generator {row['own_cpu_share']:.0%} of a core; "
              f"{row['requests']} requests, failed {row['failed']} {row['errors'] or ''}")  # fmt: skip


def whole(asked: argparse.Namespace, folder: Path) -> None:
    """Both measurements and the table."""
    here = [sys.executable, "-m", "tests.gpu.pipeline", *sys.argv[1:], "--alone", "--folder", str(folder)]
    bare: list[dict[str, Any]] = []
    if asked.engine in PEERS:
        if not (folder / "tokenizer.json").exists():
            subprocess.run([*here, "--write"], check=True, timeout=120)
        bare = peer(asked, folder) if asked.bare else []
    elif asked.bare:
        subprocess.run(here, check=True, timeout=300)
        bare = json.loads((folder / "alone.json").read_text())
    data = Path(tempfile.mkdtemp(prefix="pipeline-"))
    process, state = up(asked, folder, data)
    try:
        words = words_for(folder, asked.prompt)
        print(f"prompts of {words} words are {prompt_tokens(state.http_url, state.model, words)} tokens", flush=True)
        rows = []
        for streams, generations in zip(asked.streams, asked.generations, strict=True):
            where = ("--state", data / "penstock" / "state.json")
            bench(asked, data, words, streams, generations, *where).wait(timeout=120)
            rows.append(row_of(data, generations))
        table(asked, rows, bare)
        if asked.json:
            asked.json.write_text(
                json.dumps({"shape": asked.shape, "engine": asked.engine, "bare": bare, "rows": rows})
            )
        if asked.profile:
            profile(asked, state, data, words)
        report(data)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(data, ignore_errors=True)


def report(data: Path) -> None:
    """Warnings in the logs, each kind once."""
    lines: Counter[str] = Counter()
    for path in [*(data / "penstock" / "logs").glob("*.log")]:
        for line in path.read_text(errors="replace").splitlines():
            if '"warning"' in line or '"error"' in line or "Traceback" in line:
                try:
                    said = json.loads(line)
                    lines[f"{path.name}: {said.get('event')}"] += 1
                except ValueError:
                    lines[f"{path.name}: {line[:200]}"] += 1
    for line, count in lines.most_common(12):
        print(f"{count} x {line}")


def ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--engine", choices=("native", *PEERS), default="native")
    parser.add_argument("--streams", type=ints, default=(1, 32, 128, 256))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--generations", type=ints, default=(8, 4, 3, 3), help="requests of each stream, by row")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--kv-blocks", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True, help="also without the pipeline")
    parser.add_argument("--write", action="store_true", help="the model only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="the first half only")
    parser.add_argument("--folder", type=Path, help="of the model; default: one in /dev/shm, removed at the end")
    asked = parser.parse_args()
    if asked.alone:
        alone(asked, asked.folder)
        return
    if asked.write:
        make(asked.folder / f"random-{asked.shape}", asked.shape)
        return
    memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > ROOM
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="model-", dir="/dev/shm" if memory else None))
    try:
        whole(asked, folder / f"random-{asked.shape}")
    finally:
        if not asked.folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
