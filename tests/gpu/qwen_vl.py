"""Images and videos on a GPU: answers of a small Qwen2.5-VL model are those of transformers' ``generate``.

python -m tests.gpu.qwen_vl
"""

import argparse
import tempfile
from pathlib import Path

import torch

from penstock.infra.model import modeldir
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.native import qwen_vl
from tests.workers.engines.native.models import run, tokens
from tests.workers.engines.native.test_qwen_vl import CASES, asking, encoded, media_of, prompt

COUNT = 48


def answers(model: modeldir.ModelDir, together: bool, **options: int | bool) -> dict[str, list[int]]:
    """What an engine on the GPU answers to each case."""
    sizes = {"kv_blocks": 400, "block_size": 16, "embed_slots": 64, "max_running": 16, "warm": True, **options}
    engine = build(str(model.path), NativeOptions(device="cuda", dtype="float32", **sizes))  # type: ignore[arg-type]
    print(f"  {type(engine.executor).__name__ if engine.executor else 'overlapping executor'}, {options}")
    asked = []
    for name, parts in CASES.items():
        words, spans = prompt(model, *parts)
        slots = encoded(engine.vision, media_of(parts), spans).slots
        asked.append(asking(words, spans, slots, COUNT, key=name))
    said: dict[object, list[int]] = {}
    for group in [asked] if together else [[each] for each in asked]:
        said |= tokens(run(engine, group))
    engine.close()
    return said  # type: ignore[return-value]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as made:
        model = modeldir.load(qwen_vl.write(Path(made), wider=4))
        wanted = {}
        for name, parts in CASES.items():
            words, _ = prompt(model, *parts)
            wanted[name] = qwen_vl.generated(model.path, words, media_of(parts), COUNT)
        wrong = 0
        for together, options in (
            (False, {}), (True, {}), (False, {"max_batched_tokens": 37}), (True, {"max_batched_tokens": 64}),
        ):  # fmt: skip
            said = answers(model, together, **options)
            same = [name for name in CASES if said[name] == wanted[name]]
            wrong += len(CASES) - len(same)
            print(f"{len(same)} of {len(CASES)} answers of {COUNT} tokens are those of generate: {', '.join(same)}")
        raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
