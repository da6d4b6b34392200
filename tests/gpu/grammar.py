"""What structured output costs on a GPU: the time between tokens, with a schema and without, in turns, on one engine.

    python -m tests.gpu.grammar [--model DIR] [--batch 32] [--tokens 128] [--rounds 5]

It also checks that every answer that ends by itself is valid. Without ``--model``, the demo model.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema

from penstock.infra.model import modeldir
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "scores": {"type": "array", "items": {"type": "integer"}, "minItems": 100},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "scores", "kind"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint("json_schema", json.dumps(SCHEMA))


class Run:
    """The answers of one batch.

    Attributes:
        step_s: median time of a step in which all sequences decode.
    """

    def __init__(self, engine: ScheduledEngine, batch: int, tokens: int, *, constrained: bool) -> None:
        self.answers: dict[object, list[int]] = {key: [] for key in range(batch)}
        self.ended: set[object] = set()
        for key in range(batch):
            engine.submit(
                SequenceRequest(
                    key,
                    [20 + key, *range(30, 94)],
                    Sampling(temperature=1.0, seed=key),
                    Stop(max_tokens=tokens, ignore_eos=True),
                    constraint=CONSTRAINT if constrained else None,
                )
            )
        times, last = [], time.perf_counter()
        while engine.has_work():
            result = engine.step()
            assert not result.failures, result.failures
            now = time.perf_counter()
            if len(result.outputs) == batch and not result.started:
                times.append(now - last)
            if result.outputs:
                last = now
            for output in result.outputs:
                self.answers[output.key].append(output.token)
                if output.finish == "stop":
                    self.ended.add(output.key)
        self.step_s = statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.grammar", description=__doc__)
    parser.add_argument("--model", type=Path, default=modeldir.DEMO)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = modeldir.load(args.model)
    tokens = ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)
    grammars = ConstraintCompiler(lambda: tokens)
    options = NativeOptions(max_running=args.batch, max_model_len=min(1024, model.max_model_len), warm=True)
    engine = build(str(args.model), options, grammars=grammars)
    began = time.perf_counter()
    grammars.compile(CONSTRAINT)
    seconds = time.perf_counter() - began
    print(f"vocabulary {model.vocab_size}: first compilation, with the tokenizer's tables {seconds:.3f} s")
    for constrained in (False, True):
        Run(engine, args.batch, args.tokens, constrained=constrained)
    ratios = []
    for _ in range(args.rounds):
        free = Run(engine, args.batch, args.tokens, constrained=False)
        bound = Run(engine, args.batch, args.tokens, constrained=True)
        ratios.append(bound.step_s / free.step_s)
        print(f"free {free.step_s * 1e3:.3f} ms, with a schema {bound.step_s * 1e3:.3f} ms: {ratios[-1] - 1:+.1%}")
        for key in bound.ended:
            text = model.tokenizer.decode(bound.answers[key])
            jsonschema.validate(json.loads(text), SCHEMA)
    print(f"median of the pairs at batch {args.batch}: {statistics.median(ratios) - 1:+.1%}")
    engine.close()


if __name__ == "__main__":
    main()
