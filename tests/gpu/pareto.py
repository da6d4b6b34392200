"""Throughput against latency, from the figures of other scripts, as a PNG file. Needs matplotlib.

python -m tests.gpu.pareto --pipeline native.json vllm.json --split native-split.json --out FILE.png
python -m tests.gpu.pareto --sweep sweep.json --out FILE.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"native": "native engine", "vllm": "vLLM 0.26"}
LAYOUTS = {
    "aggregated": "aggregated",
    "chunked": "aggregated, steps of 1,024 tokens",
    "split": "prefill and decode apart",
    "apart": "prefill and decode apart",
}
TOKENS = 128  # of an answer of tests.gpu.pipeline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=Path, nargs="+", default=[], help="of tests.gpu.pipeline --json")
    parser.add_argument("--split", type=Path, nargs="+", default=[], help="of tests.gpu.disaggregated --json")
    parser.add_argument("--sweep", type=Path, nargs="+", default=[], help="of tests.gpu.disaggregated --sweep --json")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    from matplotlib import pyplot

    panels = [(draw, found) for draw, paths in ((pipeline, asked.pipeline), (mixed, asked.split), (swept, asked.sweep))
              if (found := [json.loads(path.read_text()) for path in paths])]  # fmt: skip
    figure, axes = pyplot.subplots(1, len(panels), figsize=(1 + 4.5 * len(panels), 4), squeeze=False)
    for axis, (draw, found) in zip(axes[0], panels, strict=True):
        draw(axis, found)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(asked.out, dpi=110)


def pipeline(axis: Any, found: list[dict[str, Any]]) -> None:
    for each in found:
        line(axis, each["rows"], f"Penstock, {NAMES[each['engine']]}", "o-")
        if each["engine"] == "vllm":
            line(axis, each["bare"], "vllm serve", "s--")
    axis.set_title("one H200, 8B shape, 512 -> 128 tokens, 1 to 256 streams", fontsize=9)
    axis.set_xlabel("ms per token of an answer, the first included (p50)", fontsize=8)
    axis.set_ylabel("tokens/s", fontsize=8)


def mixed(axis: Any, found: list[dict[str, Any]]) -> None:
    for each in found:
        for layout, rows in each["layouts"].items():
            short = [row["short"] for row in rows["mixed"].values()]
            axis.plot([row["itl_p99_ms"] for row in short], [row["steady_tokens_per_s"] for row in short],
                      "s--" if layout in ("aggregated", "chunked") else "o-", markersize=4,
                      label=f"{LAYOUTS[layout]}, {NAMES[each['engine']]}")  # fmt: skip
    axis.set_title("two H200, 8B shape, answers beside long prompts", fontsize=9)
    axis.set_xlabel("inter-token latency, p99 (ms)", fontsize=8)
    axis.set_xscale("log")
    axis.set_ylabel("tokens/s", fontsize=8)


def swept(axis: Any, found: list[dict[str, Any]]) -> None:
    for each in found:
        for layout, rows in sorted(each["layouts"].items()):
            points = [(row["per_user"], row["per_gpu"], streams) for streams, row in rows["sweep"].items()]
            axis.plot([x for x, _, _ in points], [y for _, y, _ in points],
                      "s--" if layout in ("aggregated", "chunked") else "o-", markersize=4,
                      label=f"{LAYOUTS[layout]}, {NAMES[each['engine']]}")  # fmt: skip
            for x, y, streams in points:
                axis.annotate(streams, (x, y), fontsize=6, xytext=(4, 3), textcoords="offset points")
    axis.set_title("two H200, 8B shape, 1,024 -> 256 tokens, by connections", fontsize=9)
    axis.set_xlabel("tokens/s of an answer, after its first token", fontsize=8)
    axis.set_ylabel("tokens/s per GPU", fontsize=8)


def line(axis: Any, rows: list[dict[str, Any]], label: str, style: str) -> None:
    axis.plot([row["latency_p50_ms"] / TOKENS for row in rows], [row["tokens_per_s"] for row in rows], style,
              markersize=4, label=label)  # fmt: skip


if __name__ == "__main__":
    main()
