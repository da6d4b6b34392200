"""Speculation on a GPU: answers with and without proposals, which must be equal, and their speed.

python -m tests.gpu.speculation [demo] [8b] [eagle] [eagle-8b]
TRITON_INTERPRET=1 python -m tests.gpu.speculation eagle     (without a GPU, slowly)

The demo model has a draft model and a head that were trained for it. For an 8B Llama's shape with random weights there
is none; a model that resembles it is made: the last layers add little to the residual stream, and the draft model lacks
them.

``eagle`` compares proposals of EAGLE-3 heads with those of plain torch on a CPU. For the 8B shape a head with random
weights proposes, and its proposals are then replaced: each is right with a probability of ``RIGHT``. The model's
answers are certain there, since rounding would change those of random weights, and with them which proposals are right.
"""

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import assemble, build
from penstock.workers.engines.native.model.eagle import head_config, load_head
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model import task_mix
from tests.demo_model.eagle import random_head
from tests.demo_model.template import prompt
from tests.gpu.native import INTERPRETED, interpreted
from tests.workers.engines.native import models

TASKS = ("copying", "counting", "facts", "json", "needle", "thinking")
DRAFT = str(modeldir.DEMO.parent / "demo-draft")
HEAD = str(Path(__file__).parents[1] / "data" / "demo-eagle")
PER_TASK, NEW = 4, 160
LAYERS, SHARE = 2, 0.02
RIGHT = 0.75


def asked(tag: object) -> list[SequenceRequest]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(modeldir.DEMO / "tokenizer.json"))
    samples = [sample for task in TASKS for sample in task_mix.cases(task, PER_TASK, 7)]
    texts = [tokenizer.encode(prompt(each.messages, each.tools), add_special_tokens=False) for each in samples]
    return [
        SequenceRequest((tag, n), tokens, Sampling(temperature=0.0 if n % 2 else 0.6, seed=n), Stop(NEW))
        for n, tokens in enumerate(texts)
    ]


def run(
    engine: Any, requests: list[SequenceRequest], together: int
) -> tuple[float, dict[Any, list[int]], tuple[float, float]]:
    """Seconds, tokens by number, and medians of a step with prompts and of one without; so many requests at a time."""
    found: dict[Any, list[int]] = {request.key[1]: [] for request in requests}  # type: ignore[index]
    times: dict[bool, list[float]] = {True: [], False: []}
    began = time.perf_counter()
    for first in range(0, len(requests), together):
        for request in requests[first : first + together]:
            engine.submit(request)
        while engine.has_work():
            at = time.perf_counter()
            result = engine.step()
            times[bool(result.started)].append(time.perf_counter() - at)
            for output in result.outputs:
                found[output.key[1]].append(output.token)
    prompts, steps = (statistics.median(times[each]) * 1e3 for each in (True, False))
    return time.perf_counter() - began, found, (prompts, steps)


def demo() -> None:
    plain: dict[int, dict[Any, list[int]]] = {}
    for dtype in ("float32",):
        for name, options in (("none", {}), ("n-gram", {"speculative_model": "ngram"}),
                              ("draft model", {"speculative_model": DRAFT}),
                              ("EAGLE-3 head", {"speculative_model": HEAD})):  # fmt: skip
            made = NativeOptions(device="cuda", dtype=dtype, kv_blocks=2000, max_running=32, warm=True, **options)  # type: ignore[arg-type]
            engine = build(str(modeldir.DEMO), made)
            run(engine, asked("first"), 8)
            for together in (1, 8):
                before = engine.stats()
                seconds, found, (prompt_ms, step_ms) = run(engine, asked(together), together)
                after = engine.stats()
                count = sum(map(len, found.values()))
                proposed = after.draft_tokens - before.draft_tokens
                right = after.accepted_tokens - before.accepted_tokens
                same = sum(found[n] == plain.setdefault(together, found)[n] for n in found)
                print(f"{dtype}, proposals: {name}, {together} at a time: {count / seconds:,.0f} tokens/s; {right} of "
                      f"{proposed} proposals right; {same} of {len(found)} answers equal; {count} tokens, a step with "
                      f"prompts {prompt_ms:.2f} ms, another {step_ms:.2f} ms", flush=True)  # fmt: skip
            engine.close()


def pair() -> tuple[Any, Any]:
    """An 8B-shaped model, and one of its first two layers."""
    from tests.gpu.beside import config
    from tests.gpu.native import large

    torch.manual_seed(1)
    target = large(config("8b"))
    for layer in target.model.layers[LAYERS:]:
        layer.self_attn.o_proj.weight.mul_(SHARE)
        layer.mlp.down_proj.weight.mul_(SHARE)
    shape = config("8b")
    shape.num_hidden_layers = LAYERS
    draft = large(shape)
    kept = set(dict(draft.named_parameters()))
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in kept}, strict=False)
    return target, draft


def eight() -> None:
    from tests.gpu.beside import SHAPES
    from tests.gpu.native import ask, drive

    vocab = SHAPES["8b"][0]
    for tokens in (0, 2, 4, 6):
        target, draft = pair()
        options: dict[str, Any] = {"speculative_model": "draft", "num_speculative_tokens": tokens} if tokens else {}
        made = NativeOptions(max_running=32, max_model_len=4096, warm=True, **options)
        engine = assemble(describe(target), made, draft=describe(draft) if tokens else None)
        del target, draft
        for streams in (1, 8, 32):
            drive(engine, ask(streams, 512, 8, vocab, 50 + streams))
            before = engine.stats()
            seconds = min(drive(engine, ask(streams, 512, 128, vocab, turn + streams))[0] for turn in (1, 2))
            after = engine.stats()
            proposed = after.draft_tokens - before.draft_tokens
            right = after.accepted_tokens - before.accepted_tokens
            print(f"8B, {tokens} proposals, {streams} x 512 -> 128: {streams * 128 / seconds:,.0f} tokens/s; "
                  f"{right} of {proposed} right", flush=True)  # fmt: skip
        engine.close()
        del engine
        torch.cuda.empty_cache()


def proposed(engine: Any, requests: list[SequenceRequest]) -> tuple[dict[Any, list[int]], dict[Any, list[int]]]:
    """Answers by key, and proposals by key and number of the tokens that were known."""
    drafter, drafts = engine._speculation.drafter, {}
    propose = drafter.propose

    def record(plan: Any, limits: Any) -> Any:
        found = propose(plan, limits)
        drafts.update({(each.sequence.key, len(each.sequence.tokens)): draft
                       for each, draft in zip(plan, found, strict=True) if draft})  # fmt: skip
        return found

    drafter.propose = record
    answers = models.tokens(models.run(engine, requests))
    drafter.propose = propose
    return answers, drafts


def eagle() -> None:
    """Tiny models in float32: answers and proposals by the kernels, with and without graphs, and by plain torch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    lengths, count = ((3, 20, 50), 12) if INTERPRETED else ((1, 9, 40, 90, 200, 330), 40)
    forms: dict[str, dict[str, Any]] = {
        "sglang": {"proposed": 100},
        "vllm": {"form": "vllm", "norm_before_residual": True, "own_embedding": True},
        "narrow": {"hidden": 32, "head_dim": 16, "heads": 2, "proposed": 128},
    }
    if INTERPRETED:
        forms.pop("narrow")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        model = models.save("llama", Path(folder))
        for name, more in forms.items():
            head = random_head(Path(folder) / name, vocab=models.VOCAB, inputs=64, **more)
            given: dict[str, Any] = {
                "dtype": "float32", "kv_blocks": 400, "block_size": 16, "max_running": 8, "max_batched_tokens": 128,
                "speculative_model": str(head), "num_speculative_tokens": 3,
            }  # fmt: skip
            requests = [
                models.request(
                    (n, length), models.prompt(length, n), count, Sampling(temperature=0.8 * (n % 2), seed=n)
                )
                for n, length in enumerate(lengths)
            ]
            plain = build(str(model), NativeOptions(device="cpu", **given))
            expected = [proposed(plain, requests) for _ in range(2)]  # the second time from the prefix cache
            for warm in (False,) if INTERPRETED else (False, True):
                with interpreted() if INTERPRETED else contextlib.nullcontext():
                    engine = build(
                        str(model), NativeOptions(device="cpu" if INTERPRETED else "cuda", warm=warm, **given)
                    )
                kernels = type(engine._speculation.drafter).__name__ == "CudaEagle"  # type: ignore[union-attr]
                for turn, (answers, drafts) in enumerate(expected):
                    found, ours = proposed(engine, requests)
                    same = sum(ours.get(each) == draft for each, draft in drafts.items())
                    equal = sum(found[each] == answer for each, answer in answers.items())
                    fits = kernels and equal == len(answers) and same >= 0.98 * len(drafts)
                    good &= fits
                    print(f"eagle {name}, graphs {warm}, turn {turn}: {equal} of {len(answers)} answers and {same} of "
                          f"{len(drafts)} proposals equal{'' if fits else '   <--'}", flush=True)  # fmt: skip
                engine.close()
    if not good:
        raise SystemExit("eagle: the kernels propose or answer something else")


class Corrected:
    """A drafter whose proposals are replaced by known answers, each wrong with a probability."""

    def __init__(self, drafter: Any, answers: dict[Any, list[int]]) -> None:
        self._drafter, self._answers, self._random = drafter, answers, random.Random(1)

    def propose(self, plan: Any, limits: Any) -> list[list[int]]:
        drafts: list[list[int]] = self._drafter.propose(plan, limits)
        for scheduled, draft in zip(plan, drafts, strict=True):
            sequence = scheduled.sequence
            output, answer = sequence.tokens[sequence.prompt_len :], self._answers.get(sequence.key[1], [])
            if output == answer[: len(output)]:
                right = answer[len(output) : len(output) + len(draft)]
                draft[: len(right)] = [token if self._random.random() < RIGHT else token ^ 1 for token in right]
        return drafts

    def close(self) -> None:
        self._drafter.close()


def certain(model: Any) -> Any:
    """Every token is followed by the next one of the vocabulary, whatever is rounded; steps take as long as before."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(SHARE / 10)
        layer.mlp.down_proj.weight.mul_(SHARE / 10)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    return model


def eagle_eight() -> None:
    from tests.gpu.beside import SHAPES, config
    from tests.gpu.native import ask, drive, large

    vocab = SHAPES["8b"][0]
    answers: dict[Any, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        head = random_head(
            Path(folder), vocab=vocab, inputs=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, proposed=32000,
            std=0.02, dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        written = head_config(str(head))
        assert written is not None
        for tokens in (0, 2, 4, 6):
            torch.manual_seed(1)
            target = describe(certain(large(config("8b"))))
            options: dict[str, Any] = (
                {"speculative_model": str(head), "num_speculative_tokens": tokens} if tokens else {}
            )
            draft = load_head(str(head), written, target) if tokens else None
            engine = assemble(
                target, NativeOptions(max_running=32, max_model_len=4096, warm=True, **options), draft=draft
            )
            del target, draft
            if tokens:
                speculation: Any = engine._speculation
                speculation.drafter = Corrected(speculation.drafter, answers)
            for streams in (1, 8, 32):
                drive(engine, ask(streams, 512, 8, vocab, 50 + streams))
                before, times = engine.stats(), []
                for _ in range(2):
                    requests = [
                        SequenceRequest((tokens, (streams, n)), each.prompt, each.sampling, each.stop)
                        for n, each in enumerate(ask(streams, 512, 128, vocab, streams))
                    ]
                    seconds, found, _ = run(engine, requests, streams)
                    times.append(seconds)
                if not tokens:
                    answers |= found
                after = engine.stats()
                share = (after.accepted_tokens - before.accepted_tokens) / max(
                    1, after.draft_tokens - before.draft_tokens
                )
                same = sum(found[each] == answers[each] for each in found)
                print(f"8B, EAGLE-3, {tokens} proposals, {streams} x 512 -> 128: {streams * 128 / min(times):,.0f} "
                      f"tokens/s; {share:.0%} right; {same} of {len(found)} answers equal", flush=True)  # fmt: skip
            engine.close()
            del engine
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["demo", "8b"])
    asked = parser.parse_args()
    print("Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name(), torch.__version__)
    for what in asked.what:
        {"demo": demo, "8b": eight, "eagle": eagle, "eagle-8b": eagle_eight}[what]()


if __name__ == "__main__":
    main()
