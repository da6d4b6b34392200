"""What structured output supports, whether what it generates is valid, and what it costs.

    pip download --no-deps --no-binary :all: jsonschema && tar xf jsonschema-*.tar.gz
    python -m tests.structured schemas jsonschema-*/json/tests/draft2020-12
    python -m tests.structured speed

``schemas``: of the JSON-Schema-Test-Suite, by group of keywords: the share of schemas that compile, and of their random
instances, drawn token by token under the mask, those that ``jsonschema`` finds valid. Schemas that no value satisfies,
and those whose documents lie elsewhere ("remotes"), are not counted.

``speed``: time between tokens of the native engine with the demo model on the CPU, 32 sequences at once: with a schema
and without, in turns.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from penstock.infra.model import modeldir
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, ModelTokens
from penstock.workers.engines.engine_protocol import RequestError, SequenceRequest

GROUPS = {
    "object": ("properties", "additionalProperties", "patternProperties", "required", "minProperties", "maxProperties",
               "propertyNames", "dependentRequired"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "combinators": ("allOf", "anyOf", "oneOf", "not", "if-then-else"),
    "others": ("type", "enum", "const", "ref", "defs", "default", "boolean_schema"),
}  # fmt: skip
ENFORCED = [
    kind
    for kind in ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    if kind in jsonschema.FormatChecker.checkers
]
INSTANCES = 5
MOST_TOKENS = 600
FREE_TOKENS = 12
SPEED_ROUNDS, SEQUENCES, TOKENS = 5, 32, 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 40},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "scores", "kind"],
    "additionalProperties": False,
}


def cases(folder: Path, files: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in files:
        for case in json.loads((folder / f"{name}.json").read_text()):
            text = json.dumps(case["schema"])
            if any(test["valid"] for test in case["tests"]) and "http://localhost" not in text:
                yield f"{name}: {case['description']}", case["schema"]


class Drawer:
    """Draws random instances of schemas."""

    def __init__(self) -> None:
        model = modeldir.load(modeldir.DEMO)
        self._tokenizer, self._ends = model.tokenizer, model.eos_token_ids
        tokens = ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self.compiler = ConstraintCompiler(lambda: tokens)
        ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in ('"', "}", "]", "0", ",")]
        self._closing = [*self._ends, *(each[0] for each in ids if len(each) == 1)]

    def draw(self, constraint: Constraint, seed: int) -> str | None:
        """The text of an instance; None: it did not end."""
        matcher = self.compiler.matcher(constraint, 0, Stop(max_tokens=MOST_TOKENS))
        rng, tokens = random.Random(seed), list[int]()
        while len(tokens) < MOST_TOKENS:
            matcher.follow(tokens)
            mask = matcher.mask()
            assert not matcher.error, matcher.error
            allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
            token = rng.choice(allowed)
            if len(tokens) > FREE_TOKENS:
                token = next((each for each in self._closing if each in allowed), token)
            if token in self._ends:
                return str(self._tokenizer.decode(tokens))
            tokens.append(token)
        return None


def schemas(folder: Path) -> None:
    drawer, total = Drawer(), Counter[str]()
    for group, files in GROUPS.items():
        count = Counter[str]()
        for name, schema in cases(folder, files):
            constraint = Constraint("json_schema", json.dumps(schema))
            count["schemas"] += 1
            try:
                drawer.compiler.compile(constraint)
            except RequestError as error:
                print(f"  not supported: {name}: {error.message.splitlines()[0][:110]}")
                continue
            count["supported"] += 1
            validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(ENFORCED))
            for seed in range(INSTANCES):
                text = drawer.draw(constraint, seed)
                count["unfinished" if text is None else "drawn"] += 1
                if text is not None and not validator.is_valid(json.loads(text)):
                    count["invalid"] += 1
                    print(f"  invalid: {name}: {text[:100]!r}")
        total += count
        _report(group, count)
    _report("all", total)


def _report(group: str, count: Counter[str]) -> None:
    share = 100 * count["supported"] / max(1, count["schemas"])
    print(
        f"| {group} | {count['schemas']} | {share:.0f} % | {count['drawn']} | {count['invalid']} | "
        f"{count['unfinished']} |",
        flush=True,
    )


def speed() -> None:
    from penstock.workers.engines.native.build import build
    from penstock.workers.engines.native.model.options import NativeOptions

    model = modeldir.load(modeldir.DEMO)
    tokens = ModelTokens(model.tokenizer, model.vocab_size, model.eos_token_ids)
    grammars = ConstraintCompiler(lambda: tokens)
    engine = build(
        str(modeldir.DEMO), NativeOptions(kv_blocks=600, max_running=SEQUENCES, device="cpu"), grammars=grammars
    )
    constraint = Constraint("json_schema", json.dumps(SCHEMA))
    grammars.compile(constraint)

    def step_s(constrained: bool) -> float:
        """Median time of a step in which all sequences decode."""
        for key in range(SEQUENCES):
            engine.submit(
                SequenceRequest(
                    key,
                    [20 + key, *range(30, 60)],
                    Sampling(temperature=1.0, seed=key),
                    Stop(max_tokens=TOKENS, ignore_eos=True),
                    constraint=constraint if constrained else None,
                )
            )
        times = []
        while engine.has_work():
            began = time.perf_counter()
            result = engine.step()
            if len(result.outputs) == SEQUENCES and not result.started:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    step_s(False), step_s(True)
    pairs = [(step_s(False), step_s(True)) for _ in range(SPEED_ROUNDS)]
    for free, constrained in pairs:
        print(f"free {free * 1e3:.3f} ms, with a schema {constrained * 1e3:.3f} ms: {constrained / free - 1:+.1%}")
    print(f"median of the pairs: {statistics.median(c / f - 1 for f, c in pairs):+.1%}")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=__doc__)
    parser.add_argument("what", choices=("schemas", "speed"))
    parser.add_argument("folder", type=Path, nargs="?", help="of the suite's draft")
    args = parser.parse_args()
    if args.what == "schemas":
        schemas(args.folder)
    else:
        speed()


if __name__ == "__main__":
    main()
