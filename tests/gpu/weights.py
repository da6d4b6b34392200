"""Weights that change on a GPU: seconds to sleep, to wake up and to update, memory meanwhile, and answers behind each.

python -m tests.gpu.weights [--layers 32] [--small]    (--small: the demo model, also on a CPU)
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.infra.model.modeldir import DEMO
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.adapters import other_weights
from tests.gpu.native import LLAMA_8B, ask, large

GIB = 1 << 30


def folders(asked: argparse.Namespace, home: Path) -> tuple[Path, Path]:
    """Of one model with two sets of random weights."""
    if asked.small:
        return DEMO, other_weights(DEMO, home / "other")
    made = []
    for name in ("one", "two"):
        config = type(LLAMA_8B)(**LLAMA_8B.to_dict() | {"num_hidden_layers": asked.layers})
        large(config).save_pretrained(home / name)
        torch.cuda.empty_cache()
        made.append(home / name)
    return made[0], made[1]


def answers(engine: ScheduledEngine) -> dict[object, list[int]]:
    for request in ask(8, 200, 32, 1000, seed=1):
        engine.submit(request)
    found: dict[object, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            found.setdefault(output.key, []).append(output.token)
    return found


def timed(what: str, work: Callable[[], None]) -> None:
    began = time.perf_counter()
    work()
    used = ""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        used = f", {(whole - free) / GIB:.1f} GiB of the device are used"
    print(f"{what}: {time.perf_counter() - began:.2f} s{used}", flush=True)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quantization", default="")
    asked = parser.parse_args()
    options = NativeOptions(warm=True, kv_blocks=2000, max_running=64, quantization=asked.quantization)
    with tempfile.TemporaryDirectory() as home:
        one, two = folders(asked, Path(home))
        engines: list[ScheduledEngine] = []
        timed("start", lambda: engines.append(build(str(one), options)))
        engine = engines.pop()
        weights, before = engine.weights, answers(engine)
        assert weights is not None
        weights.hold()
        for _ in range(2):
            timed("sleep", weights.sleep)
            timed("wake", weights.wake)
        weights.proceed()
        slept = answers(engine) == before
        weights.hold()
        timed("update", lambda: weights.replace(two, lambda key, generated: b"another"))
        weights.proceed()
        updated = answers(engine)
        weights.hold()
        weights.sleep()
        weights.wake()
        weights.proceed()
        again = answers(engine) == updated
        engine.close()
        timed("start with the other weights", lambda: engines.append(build(str(two), options)))
        fresh = answers(engines[0]) == updated
    print(f"as before after sleep: {slept}, as a new engine after the update: {fresh}, and after sleep then: {again}")
    return slept and fresh and again and updated != before


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
