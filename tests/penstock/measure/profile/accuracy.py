"""How far the roofline estimate is from what was measured on one H200.

``python -m tests.penstock.measure.profile.accuracy`` prints the table of docs/results/gpus.md.
Measured figures are those of that page: the native engine alone unless the name says otherwise.
"""

from functools import cache
from typing import NamedTuple

import msgspec

from penstock.infra.engine_args.memory_estimate import shape_of
from penstock.measure.profile.roofline import GPUS, Efficiency, Mapping, RooflineEngine

KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads")  # fmt: skip
COMMON = {"max_position_embeddings": 40_000, "torch_dtype": "bfloat16"}
SMALL = (32768, 1024, 4096, 16, 16, 8)
LLAMA = (128256, 4096, 14336, 32, 32, 8)
MIXTURE = (151936, 2048, 768, 24, 32, 4)
EXPERTS = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


class Row(NamedTuple):
    """``fitted``: the efficiencies were chosen with it in view."""

    what: str
    estimate: float
    measured: float
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.estimate / self.measured - 1


def engine(sizes: tuple[int, ...], bits: float = 16.0, **more: object) -> RooflineEngine:
    shape = shape_of({**dict(zip(KEYS, sizes, strict=True)), **COMMON, **more})
    return RooflineEngine(msgspec.structs.replace(shape, linear_bits=bits), GPUS["H200"], Mapping())


def throughput(own: RooflineEngine, streams: int, prompt: int, answer: int) -> float:
    """Tokens per second if all prompts are computed first, then all answers."""
    fixed = Efficiency().prompt_ms
    prefill = streams * (own.prefill_ms(prompt) - fixed) + fixed
    return streams * answer / (prefill + sum(own.step_ms(streams, prompt + at) for at in range(1, answer))) * 1e3


@cache
def rows() -> list[Row]:
    big, small, mixture, fp8 = engine(LLAMA), engine(SMALL), engine(MIXTURE, **EXPERTS), engine(LLAMA, 8.0)
    itl = ((1, 4.0), (8, 4.8), (32, 5.5), (64, 6.1), (128, 7.8), (256, 12.7))
    found = [Row(f"8B, {n} × 512 → 128, ITL ms (pipeline)", big.step_ms(n, 576), ms, True) for n, ms in itl]
    prompts = ((512, 29892, False), (2048, 41671, True), (32000, 27156, True))
    found += [Row(f"8B, prompt of {n}, tokens/s", n / big.prefill_ms(n) * 1e3, rate, fit) for n, rate, fit in prompts]
    found += [Row("8B, prompt of 4096, TTFT ms (pipeline)", big.prefill_ms(4096), 99.0)]
    for count, tokens, rate in ((16, 512, 44861), (16, 2048, 42836), (8, 4096, 41594), (4, 8192, 38723)):
        spent = big.prefill_ms(tokens) - Efficiency().prompt_ms
        found.append(Row(f"8B, {count} prompts of {tokens}, tokens/s", tokens / spent * 1e3, rate))
    found.append(Row("8B, handoff of 4096 tokens, ms (two GPUs)", big.handoff_ms(4096), 2.14, True))
    loads = ((1, 512, 242), (32, 512, 3868), (128, 512, 6583), (256, 512, 7152), (512, 128, 18127), (64, 2048, 1921))
    for streams, tokens, rate in loads:
        found.append(Row(f"8B, {streams} × {tokens} → 128, tokens/s", throughput(big, streams, tokens, 128), rate))
    for streams, rate in ((1, 364), (32, 5632), (128, 9914), (256, 10835)):
        found.append(Row(f"8B fp8, {streams} × 512 → 128, tokens/s", throughput(fp8, streams, 512, 128), rate))
    for streams, ms in ((1, 0.5), (32, 0.9), (128, 1.5), (256, 2.2)):
        found.append(Row(f"0.3B, {streams} × 512 → 128, ITL ms", small.step_ms(streams, 576), ms))
    for streams, rate in ((1, 557), (32, 3942), (128, 10185), (256, 14491)):
        what = f"Qwen3-30B-A3B's shape, half, {streams} × 512 → 128, tokens/s"
        found.append(Row(what, throughput(mixture, streams, 512, 128), rate))
    return found


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"


def main() -> None:
    for row in rows():
        fitted = "fitted" if row.fitted else ""
        print(f"| {row.what} | {figure(row.estimate)} | {figure(row.measured)} | {row.error:+.0%} | {fitted} |")


if __name__ == "__main__":
    main()
