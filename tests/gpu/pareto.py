"""Throughput against latency, from the figures of other scripts, as a PNG file. Needs matplotlib.

python -m tests.gpu.pareto --pipeline native.json vllm.json --split native-split.json vllm-split.json --out FILE.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"native": "native engine", "vllm": "vLLM 0.26"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=Path, nargs="+", default=[], help="of tests.gpu.pipeline --json")
    parser.add_argument("--split", type=Path, nargs="+", default=[], help="of tests.gpu.disaggregated --json")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for path in asked.pipeline:
        found = json.loads(path.read_text())
        line(left, found["rows"], f"Penstock, {NAMES[found['engine']]}", "o-")
        if found["engine"] == "vllm":
            line(left, found["bare"], "vllm serve", "s--")
    left.set_title("one H200, 8B shape, 512 -> 128 tokens, 1 to 256 streams", fontsize=9)
    left.set_xlabel("ms per token of an answer, the first included (p50)", fontsize=8)
    for path in asked.split:
        found = json.loads(path.read_text())
        for layout, style in (("aggregated", "s--"), ("split", "o-")):
            short = [each["short"] for each in found["layouts"][layout]["mixed"].values()]
            right.plot([each["itl_p99_ms"] for each in short], [each["tokens_per_s"] for each in short], style,
                       markersize=4, label=f"{layout}, {NAMES[found['engine']]}")  # fmt: skip
    right.set_title("two H200, 64 x 256 -> 256, alone and beside six prompts of 4,000", fontsize=9)
    right.set_xlabel("inter-token latency, p99 (ms)", fontsize=8)
    right.set_xscale("log")
    for axis in (left, right):
        axis.set_ylabel("tokens/s", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(asked.out, dpi=110)


def line(axis: Any, rows: list[dict[str, Any]], label: str, style: str) -> None:
    tokens = 128
    axis.plot([row["latency_p50_ms"] / tokens for row in rows], [row["tokens_per_s"] for row in rows], style,
              markersize=4, label=label)  # fmt: skip


if __name__ == "__main__":
    main()
