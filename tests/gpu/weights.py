"""Weights that change on a GPU: seconds to sleep, wake up and update, from a folder and from another process.

python -m tests.gpu.weights [--layers 32] [--backends nccl,nixl,gloo] [--small]    (--small: on a CPU, too)
python -m tests.gpu.weights --demo    (log-probabilities of the demo model only; on a CPU, too)
python -m tests.gpu.weights --engine sglang [--layers 8] [--small]    (or vllm; --small: on the stand-ins, too)
python -m tests.gpu.weights --engine vllm --layers 8 --engine-args '{"compilation_config": {"mode": 0}}'

The trainer is a process of its own: over gloo and NIXL on the same GPU, over NCCL on the next one, if there is one. It
computes log-probabilities of the engine's sampled tokens again by ``transformers``, in bfloat16 and in float32: with
random weights, bfloat16 itself is far from float32, so the engine's error has to be no larger than that of
transformers. With the demo model, which is trained, the difference from transformers has bars of its own; the largest
may be as large as the largest error of transformers, if that is above the bar: no engine can be nearer.
Parts that no longer fit into --budget-s are left out and said so; the last lines and the status say what was right.

With --engine, an engine of another package gets the weights of a second folder, also in the midst of an answer, and
sleeps twice. Its answers have to be those of a fresh worker of that folder, and the first folder's again after the way
back. Answers are compared with others whose prompts were, or were not, cached likewise. With random weights, kernels
that a process chooses by measuring them may decide near ties: see --engine-args.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from penstock.client.weights import _header, send_weights
from penstock.infra.model.modeldir import DEMO
from penstock.schemas.fleet import TensorSource
from penstock.schemas.requests import Sampling
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import Output
from penstock.workers.engines.native import host_copies
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.kv_transfer.tensors import receive
from tests.adapters import other_weights
from tests.gpu.native import LLAMA_8B, ask, large
from tests.gpu.pipeline import SGLANG, tokenizer
from tests.workers.engines import contract
from tests.workers.engines.contract import ALL, ROOT, WORDS, Driver
from tests.workers.engines.contract import ask as contract_ask

GIB = 1 << 30
MEAN, MOST = 0.01, 0.1  # of the differences of log-probabilities from transformers', with trained weights
NO_WORSE = 1.1  # error against float32, by that of transformers
DRAWN = Sampling(temperature=0.8, seed=3, logprobs=0)
FRESH = "of a fresh worker: "
SAME = 64  # tokens of an answer that continues; with random weights, rounding decides a later one
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


def shape(layers: int) -> Any:
    return type(LLAMA_8B)(**LLAMA_8B.to_dict() | {"num_hidden_layers": layers})


def place(size: int) -> str:
    """Where files of so many bytes fit, host memory first."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if Path(folder).is_dir() and shutil.disk_usage(folder).free > size:
            return folder
    raise SystemExit(f"no folder has room for {size / GIB:.0f} GiB: lower --layers")


def save(model: Any, folder: Path) -> None:
    """As ``save_pretrained``, which takes seven times as long."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]  # which SGLang needs
    model.config.save_pretrained(folder)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    header, _ = _header(tensors, {name: each.dtype for name, each in tensors.items()})
    at = len(header)
    with (folder / "model.safetensors").open("wb") as opened:
        opened.write(header)
        opened.flush()
        for each in tensors.values():
            host_copies.write(opened.fileno(), at, each)
            at += each.nbytes


def outputs(engine: ScheduledEngine, sampling: Sampling | None = None, count: int = 8) -> dict[Any, list[Output]]:
    for request in ask(count, 200, 32, 1000, 1, *([sampling] if sampling else [])):
        engine.submit(request)
    found: dict[Any, list[Output]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            found.setdefault(output.key, []).append(output)
    return found


def answers(engine: ScheduledEngine) -> dict[Any, list[int]]:
    return {key: [each.token for each in found] for key, found in outputs(engine).items()}


def timed(what: str, work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    used = ""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        used = f", {(whole - free) / GIB:.1f} GiB of the device are used"
    took = time.perf_counter() - began
    say(f"{what}: {took:.2f} s{used}")
    return took


def update(engine: ScheduledEngine, folder: Path) -> None:
    weights, read = engine.weights, []
    assert weights is not None
    timed("  read and checked, while the engine computes", lambda: read.append(weights.read(folder)))
    weights.hold()
    timed("  put in place, while it stands still", lambda: weights.replace(read[0], lambda key, generated: b"another"))
    weights.proceed()


class Served:
    """An engine behind the one endpoint that a trainer calls."""

    def __init__(self, engine: ScheduledEngine, model: Path, staging: Path, device: torch.device) -> None:
        self.engine, self.model, self.staging, self.device = engine, model, staging, device

    def update(self, asked: dict[str, Any]) -> dict[str, Any]:
        source = TensorSource(1, asked["from"], asked["address"], asked["port"], {"w": 1})
        written, write_part = [0.0], host_copies.write

        def write(*arguments: Any) -> None:
            began = time.perf_counter()
            write_part(*arguments)
            written[0] += time.perf_counter() - began

        with patch.object(host_copies, "write", write):
            timed(
                f"  received over {source.backend}, while the engine computes",
                lambda: receive(source, 1, self.staging, self.model, self.device, threading.Event()),
            )
        say(f"  of that, written to the file in host memory: {written[0]:.2f} s")
        update(self.engine, self.staging)
        return {"samples": [[prompt, *_drawn(found)] for prompt, found in drawn(self.engine)]}


def _drawn(found: list[Output]) -> tuple[list[int], list[float]]:
    return [each.token for each in found], [each.logprob.logprob for each in found if each.logprob is not None]


@contextmanager
def serving(served: Served) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = 200, served.update(json.loads(body))
            except Exception as error:
                status, answer = 500, {"error": {"code": "internal_error", "message": repr(error)}}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def trainer(url: str, backend: str, layers: int, device: str, small: bool) -> bool:
    """The other process: sends its tensors, and recomputes what the engine says of its tokens."""
    torch.manual_seed(5)
    if small:
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).to(device)
        for each in model.parameters():
            each.data += 0.02 * torch.randn_like(each)
    else:
        model = large(shape(layers), device)
        model.set_attn_implementation("sdpa")
    size = sum(each.nbytes for each in model.state_dict().values())
    began = time.perf_counter()
    answer = send_weights(url, model.state_dict(), backend=backend, timeout_s=60)  # type: ignore[arg-type]
    took = time.perf_counter() - began
    print(
        f"           trainer on {device}: {size / GIB:.1f} GiB sent over {backend} and served in {took:.2f} s",
        flush=True,
    )
    said = torch.tensor([each for _, _, said in answer["samples"] for each in said])
    rounded, exact = recomputed(model, answer["samples"]), recomputed(model.float(), answer["samples"])
    ours, theirs = (float((each - exact).abs().mean()) for each in (said, rounded))
    apart = (said - rounded).abs()
    print(
        f"           log-probabilities of {len(said)} sampled tokens: mean error against float32 {ours:.5f}, that of "
        f"transformers in bfloat16 {theirs:.5f}; from each other {apart.mean():.5f}, at most {apart.max():.4f}",
        flush=True,
    )
    return ours <= NO_WORSE * theirs + 1e-4


def recomputed(model: Any, samples: list[tuple[list[int], list[int], list[float]]], wide: bool = False) -> torch.Tensor:
    """Of all sampled tokens, by a forward pass over each sequence; ``wide``: the output layer in float32."""
    found = []
    with torch.inference_mode():
        for prompt, tokens, _ in samples:
            sequence = torch.tensor([prompt + tokens], device=model.device)
            if wide:
                states = model.model(sequence).last_hidden_state.float()
                logits = torch.nn.functional.linear(states, model.lm_head.weight.float())
            else:
                logits = model(sequence).logits
            values = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(values.gather(1, sequence[0, len(prompt) :, None])[:, 0].cpu())
    return torch.cat(found)


def trained(device: torch.device) -> bool:
    """The demo model in bfloat16, whose weights are a trained model's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).to(device)
    precise = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).to(device)
    good = True
    for partial in (True, False) if device.type == "cuda" else (True,):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = partial
        engine = build(str(DEMO), NativeOptions(dtype="bfloat16", kv_blocks=400, max_running=16))
        samples = [(each[0], *_drawn(each[1])) for each in drawn(engine, 64)]
        engine.close()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        said = torch.tensor([each for _, _, said in samples for each in said])
        theirs, wide, exact = (
            recomputed(*each) for each in ((model, samples), (model, samples, True), (precise, samples))
        )
        say(f"demo model in bfloat16, {len(said)} sampled tokens{'' if partial else ', all partial sums in float32'}:")
        differences = {
            f"from transformers (on average at most {MEAN}, largest {MOST})": said - theirs,
            "from transformers with the output layer in float32": said - wide,
            "error against float32": said - exact,
            "error of transformers": theirs - exact,
            "error of transformers with the output layer in float32": wide - exact,
        }
        for what, each in differences.items():
            off = each.abs()
            above = ", ".join(f"{int((off > bar).sum())} above {bar}" for bar in (MOST / 2, MOST))
            say(f"  {what}: {off.mean():.5f} on average, {above}, largest {off.max():.4f}")
        apart, ours, others = (each.abs() for each in (said - theirs, said - exact, theirs - exact))
        if partial:
            good = float(apart.mean()) <= MEAN and float(apart.max()) <= max(MOST, float(others.max()))
            good = good and float(ours.mean()) <= NO_WORSE * float(others.mean())
    return good


def drawn(engine: ScheduledEngine, count: int = 8) -> list[tuple[list[int], list[Output]]]:
    """Prompts, and what was sampled behind them."""
    requests = {each.key: list(each.prompt) for each in ask(count, 200, 32, 1000, 1)}
    return [(requests[key], found) for key, found in outputs(engine, DRAWN, count).items()]


def send(served: Served, backend: str, asked: argparse.Namespace, left_s: float) -> bool:
    device = "cpu" if not torch.cuda.is_available() else "cuda:1" if backend == "nccl" else "cuda:0"
    with serving(served) as url:
        arguments = ["--trainer", url, "--backends", backend, "--layers", str(asked.layers), "--device", device]
        try:
            child = subprocess.run(
                [sys.executable, "-m", "tests.gpu.weights", *arguments, *(["--small"] if asked.small else [])],
                timeout=max(20.0, left_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            say(f"{backend}: the trainer did not end in time")
            return False
    return child.returncode == 0


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--backends", default="nccl,nixl,gloo", help="those that cannot be used here are left out")
    parser.add_argument("--update", action="store_true", help="updates only, no sleep")
    parser.add_argument("--demo", action="store_true", help="log-probabilities of the demo model only")
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="of another package")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of the package's, as JSON")
    parser.add_argument("--fresh", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kept", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        return fresh(asked) if asked.fresh else package(asked)
    if asked.trainer:
        return trainer(asked.trainer, asked.backends, asked.layers, asked.device, asked.small)
    options = NativeOptions(warm=True, kv_blocks=2000, max_running=64, quantization=asked.quantization)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.demo:
        return trained(device)
    size = 0 if asked.small else 2 * (asked.layers * 440 + 2200) << 20
    right = {}
    with tempfile.TemporaryDirectory(dir=place(size + GIB)) as home:
        one, staging, engines = DEMO, Path(home) / "received", list[ScheduledEngine]()
        if not asked.small:
            one = Path(home) / "one"
            timed(f"random weights written to {home}", lambda: save(large(shape(asked.layers)), one))
            torch.cuda.empty_cache()
        timed("start", lambda: engines.append(build(str(one), options)))
        engine = engines[0]
        weights, before = engine.weights, answers(engine)
        timed("first token of a prompt of 200", lambda: first(engine))
        assert weights is not None
        if not asked.update:
            weights.hold()
            for _ in range(2):
                timed("sleep", weights.sleep)
                timed("wake", weights.wake)
            weights.proceed()
            timed("first token behind it", lambda: first(engine))
            right["as before, after sleep"] = answers(engine) == before
        changed = None
        for backend in asked.backends.split(","):
            if reason := unusable(backend):
                say(f"{backend}: left out, {reason}")
                continue
            left = asked.budget_s - (time.perf_counter() - BEGAN)
            if left < 25:
                say(f"{backend}: left out, {left:.0f} s are left of --budget-s")
                continue
            say(f"tensors of a second process over {backend}:")
            served = Served(engine, one, staging, device)
            right[f"log-probabilities over {backend}"] = send(served, backend, asked, left)
            now = answers(engine)
            right[f"other answers over {backend}"] = now != before and changed in (None, now)
            changed = now
            say("update from a folder, back:")
            update(engine, one)
            right[f"as before, back from {backend}"] = answers(engine) == before
        engine.close()
    right["log-probabilities of the demo model"] = trained(device)
    for what, good in right.items():
        say(f"{what}: {'right' if good else 'WRONG'}")
    return all(right.values())


def first(engine: ScheduledEngine) -> None:
    outputs_of = ask(1, 200, 1, 1000, 9)
    engine.submit(outputs_of[0])
    while engine.has_work():
        engine.step()


def package(asked: argparse.Namespace) -> bool:
    """The same of an engine of another package."""
    with tempfile.TemporaryDirectory(dir=place(0 if asked.small else 4 * (asked.layers * 440 + 2200) << 20)) as home:
        one, two = Path(home) / "one", Path(home) / "two"
        for folder in (one, two):
            if asked.small:
                other_weights(DEMO, folder, seed=len(folder.name) + ord(folder.name[0]), noise=0.02)
                continue
            model = large(shape(asked.layers))
            timed(f"random weights written to {folder}", lambda model=model, folder=folder: save(model, folder))
            tokenizer(folder, model.config.vocab_size)
            del model
            torch.cuda.empty_cache()
        found, right = of_package(asked, one, two)
        arguments = ["--engine", asked.engine, "--fresh", str(two), "--kept", json.dumps(found["kept"])]
        arguments += ["--engine-args", json.dumps(asked.engine_args)]
        child = subprocess.run(
            [sys.executable, "-m", "tests.gpu.weights", *arguments, *(["--small"] if asked.small else [])],
            stdout=subprocess.PIPE,
            check=True,
            timeout=300,
            text=True,
        )
        said_there = [line for line in child.stdout.splitlines() if line.startswith(FRESH)]  # among the engine's log
        fresh = json.loads(said_there[-1].removeprefix(FRESH))
    for what, key in {"of the second folder": "second", "of the second folder, after sleep": "slept"}.items():
        right[f"as a fresh worker {what}"] = alike(f"as a fresh worker {what}", found[key], fresh[key])
    same = common(found["rest"], fresh["rest"])
    say(f"  after the update, {same} of {len(found['rest'])} tokens are those of the fresh worker")
    right["an answer in mid-update continues as there"] = same >= min(SAME, len(fresh["rest"])) > 0
    for what, good in right.items():
        say(f"{what}: {'right' if good else 'WRONG'}")
    return all(right.values())


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two answers have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (each, its) in pairs if each != its), min(len(one), len(other)))


def alike(what: str, ones: list[list[int]], others: list[list[int]]) -> bool:
    shares = ", ".join(f"{common(*pair)} of {len(pair[0])}" for pair in zip(ones, others, strict=True))
    say(f"  {what}: equal tokens {shares}")
    return ones == others


def started(engine: str, folder: Path, more: dict[str, Any], *, small: bool) -> Driver:
    (subject,) = (each for each in ALL if each.name == engine)
    on_gpu = {} if small else {"dtype": "bfloat16", "max_model_len": 2048}
    contract.BOUND_S = 120.0  # an engine's first request may compile
    usual: dict[str, Any] = {} if small else {"sglang": SGLANG, "vllm": {"gpu_memory_utilization": 0.5}}[engine]
    with subject.present():
        settings = subject.settings(
            device="auto", kv_blocks=512, sleep_after_s=3600.0, override_engine_args=json.dumps(usual | more), **on_gpu
        )
        return Driver(subject.make(settings, folder))


def said(driver: Driver, base: bytes = ROOT) -> list[list[int]]:
    """One by one, so that a batch's size changes nothing."""
    return [driver.answer(contract_ask(number, WORDS[number : number + 100], 32, base=base)) for number in range(4)]


def running_tokens(small: bool) -> int:
    """Of an answer that still runs when new weights are read: a GPU makes 250 a second, reading takes one second."""
    return 96 if small else 1500


def of_package(asked: argparse.Namespace, one: Path, two: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    drivers, small = list[Driver](), asked.small
    timed("start", lambda: drivers.append(started(asked.engine, one, asked.engine_args, small=small)))
    driver, second = drivers[0], b"the second revision"
    weights, before = driver.engine.weights, said(driver)
    assert weights is not None
    driver.engine.submit(contract_ask("runs", WORDS[:100], running_tokens(small)))
    driver.until(lambda: len(driver.seen.of("runs")) > 8, "some tokens")
    timed("  read and checked, while the engine computes", lambda: weights.read(two))
    running = len(driver.seen.of("runs"))
    weights.hold()
    timed("  its requests are aborted", lambda: driver.until(lambda: weights.settled, "rest"))
    kept = driver.seen.tokens("runs")
    timed("  put in place, while it stands still", lambda: weights.replace(two, lambda key, generated: second))
    weights.proceed()
    driver.until(lambda: "runs" in driver.seen.ended(), "its end")
    say(f"  {running} tokens before, {len(kept)} when it stood still, {len(driver.seen.tokens('runs'))} in the end")
    found: dict[str, Any] = {"kept": kept, "rest": driver.seen.tokens("runs")[len(kept) :]}
    found["second"] = said(driver, second)  # the first prompt is cached, by the answer that was running
    right = {"other answers": found["second"] != before}
    driver.idle()
    weights.hold()
    for _ in range(2):
        timed("sleep", weights.sleep)
        timed("wake", weights.wake)
    weights.proceed()
    found["slept"] = said(driver, second)  # nothing is cached
    driver.idle()
    weights.hold()
    timed("  back to the first folder", lambda: weights.replace(weights.read(one), lambda key, generated: ROOT))
    weights.proceed()
    now = said(driver)
    right["as before, back from the second folder"] = alike("back from the second folder", now, before)
    driver.engine.close()
    return found, right


def fresh(asked: argparse.Namespace) -> bool:
    driver = started(asked.engine, Path(asked.fresh), asked.engine_args, small=asked.small)
    kept = json.loads(asked.kept)
    slept = said(driver, b"another name of these blocks, so that those below are not cached")
    rest = driver.answer(contract_ask("runs", WORDS[:100], running_tokens(asked.small), generated=kept))
    print(FRESH + json.dumps({"slept": slept, "rest": rest, "second": said(driver)}), flush=True)
    driver.engine.close()
    return True


def unusable(backend: str) -> str:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        return "NCCL needs a second GPU for the trainer"
    if backend == "nixl":
        from penstock.workers.kv_transfer.nixl import load
        from penstock.workers.kv_transfer.transport_protocol import TransportUnavailable

        try:
            load()
        except TransportUnavailable as error:
            return str(error)
    return ""


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
