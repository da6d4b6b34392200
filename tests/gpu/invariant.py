"""The batch-invariant mode on a GPU: whether answers depend on what runs beside them, and what that costs.

python -m tests.gpu.invariant [--shape 8b] [--sweep]
"""

import argparse
import random
from dataclasses import replace
from typing import Any

import torch

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import assemble
from penstock.workers.engines.native.cuda import rows as products
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.gpu.beside import SHAPES, config
from tests.gpu.native import ask, drive, large

DEVICE = "cuda"
ROWS = ((1, 512, 128), (32, 512, 128), (256, 512, 128), (16, 2048, 1))


def tiles() -> None:
    """Whether each row of a product is the same bits with any number of rows, and what products reach."""
    for columns, inner in ((6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        weight = torch.randn((columns, inner), device=DEVICE, dtype=torch.bfloat16) * 0.02
        x = torch.randn((2048, inner), device=DEVICE, dtype=torch.bfloat16)
        whole = products.invariant_product(x, weight, None, None)
        counts = (1, 2, 63, 64, 65, 256, 257, 1000)
        same = [
            count
            for count in counts
            if torch.equal(products.invariant_product(x[:count], weight, None, None), whole[:count])
        ]
        off = float((whole.float() - (x.float() @ weight.float().t())).norm() / whole.float().norm())
        print(f"product {columns} x {inner}: the same for {same} of {counts} rows, {off:.1e} from float32", flush=True)
        line = []
        for count in (1, 32, 128, 256, 2048):
            seconds = [_timed(call, x[:count], weight) for call in (_ours, torch.nn.functional.linear)]
            line.append(f"{count}: {seconds[0] * 1e6:.0f} us (cuBLAS {seconds[1] * 1e6:.0f})")
        print("  ", ", ".join(line), flush=True)


def sweep() -> None:
    """Times of other tiles, for few and for many rows."""
    few = ((64, 16, 256, 4, 4), (64, 32, 64, 4, 8), (64, 32, 128, 4, 5), (64, 64, 64, 4, 6), (64, 64, 128, 4, 4))
    some = ((128, 32, 128, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4))
    many = ((128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3))
    usual = products.shape_for
    for counts, shapes in (((1, 16, 64), few), ((96, 128, 256), some), ((512, 2048, 8192), many)):
        for count in counts:
            found = []
            for shape in (products.TileShape(*each) for each in shapes):
                products.shape_for = lambda rows, shape=shape: shape  # type: ignore[misc]
                total = 0.0
                for columns, inner in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
                    weight = torch.randn((columns, inner), device=DEVICE, dtype=torch.bfloat16) * 0.02
                    x = torch.randn((count, inner), device=DEVICE, dtype=torch.bfloat16)
                    try:
                        total += _timed(_ours, x, weight)
                    except Exception as error:  # a tile that does not fit
                        total = float("inf")
                        print(f"  {tuple(shape)}: {str(error)[:80]}")
                        break
                found.append((total * 1e6, tuple(shape)))
            found.sort()
            print(f"{count} rows, us of a layer:", "; ".join(f"{shape} {us:.0f}" for us, shape in found), flush=True)
    products.shape_for = usual


def _ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return products.invariant_product(x, weight, None, None)


def _timed(call: Any, x: torch.Tensor, weight: torch.Tensor) -> float:
    for _ in range(3):
        call(x, weight)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(20):
        call(x, weight)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 20e3)


def answers(
    engine: ScheduledEngine, requests: list[SequenceRequest], beside: int, vocab: int, seed: int
) -> dict[Any, list[int]]:
    """Tokens of the requests, with so many others beside them, submitted in a drawn order."""
    draw = random.Random(seed)
    others = [
        SequenceRequest(("other", seed, n), [draw.randrange(10, vocab) for _ in range(draw.randrange(1, 700))],
                        Sampling(temperature=1.0, seed=n), Stop(draw.randrange(1, 150), ignore_eos=True))
        for n in range(beside)
    ]  # fmt: skip
    waiting = [*requests, *others]
    draw.shuffle(waiting)
    found: dict[Any, list[int]] = {request.key: [] for request in requests}
    while waiting or engine.has_work():
        for _ in range(min(len(waiting), draw.randrange(0, 4))):
            engine.submit(waiting.pop())
        if engine.has_work():
            for output in engine.step().outputs:
                if output.key in found:
                    found[output.key].append(output.token)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=("8b", "0.3b", "moe"), default="8b")
    parser.add_argument("--sweep", action="store_true", help="times of other tiles only")
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    if asked.sweep:
        sweep()
        return
    tiles()
    vocab = SHAPES[asked.shape][0]
    for invariant in (False, True):
        torch.manual_seed(1)
        options = NativeOptions(max_running=256, max_model_len=4096, warm=True, batch_invariant=invariant)
        engine = assemble(describe(large(config(asked.shape))), replace(options, prefix_cache=False))
        rates = []
        for number, (streams, prompt, answer) in enumerate(ROWS):
            drive(engine, ask(min(streams, 8), prompt, 2, vocab, 100 + number))
            seconds = min(
                drive(engine, ask(streams, prompt, answer, vocab, 1000 * turn + number))[0] for turn in (1, 2)
            )
            rates.append(
                f"{streams} x {prompt} -> {answer}: {streams * (answer if answer > 1 else prompt) / seconds:,.0f}"
            )
        print(f"invariant {invariant}, tokens/s:", "; ".join(rates), flush=True)
        draw = random.Random(3)
        requests = [
            SequenceRequest(n, [draw.randrange(10, vocab) for _ in range(length)],
                            Sampling(temperature=1.0 if n % 2 else 0.0, seed=n, top_p=0.95 if n == 5 else 1.0),
                            Stop(120, ignore_eos=True))
            for n, length in enumerate((1, 17, 64, 200, 513, 700, 1500, 33))
        ]  # fmt: skip
        alone = {request.key: answers(engine, [request], 0, vocab, 1)[request.key] for request in requests}
        for beside in (0, 40, 250):
            found = answers(engine, requests, beside, vocab, 10 + beside)
            same = sum(found[key] == alone[key] for key in alone)
            print(f"invariant {invariant}, {beside} others beside: {same} of {len(alone)} answers as alone", flush=True)
        engine.close()
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
