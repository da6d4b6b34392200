"""The native engine over several GPUs beside vLLM over as many: the same shape, requests and limits.

python -m tests.gpu.parallel native vllm [--width 2] [--shape 8b] [--json FILE]
python -m tests.gpu.parallel native --device cpu --shape tiny     (over gloo, to try the script)

Each engine is alone in a process of its own. The native one reads random weights from a folder, which is written first,
as its ranks load their parts; vLLM draws its own. Answers are greedy and of fixed length; a row is timed from the first
request to the last answer's end, twice, and the faster one counts. With ``--width 1`` beside it, the gain of a width
shows. vLLM needs to be installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu import beside

ROWS = ((1, 512, 128), (32, 512, 128), (256, 512, 128), (16, 2048, 1))
TRIED = ((1, 32, 8), (4, 32, 8))  # of ``--shape tiny``
beside.SHAPES["tiny"] = (1024, 128, 256, 2, 8, 4)


def native(folder: Path, asked: argparse.Namespace) -> beside.Run:
    from penstock.infra.process.gc_policy import freeze_loaded
    from penstock.workers.engines.native.build import build
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.native import ask, drive

    engine = build(
        str(folder),
        NativeOptions(
            max_running=beside.RUNNING,
            max_batched_tokens=beside.BATCHED,
            max_model_len=beside.LONGEST,
            device=asked.device,
            tensor_parallel_size=asked.width,
            warm=True,
        ),
    )
    freeze_loaded()
    vocab = beside.SHAPES[asked.shape][0]
    return lambda streams, prompt, answer, seed: drive(engine, ask(streams, prompt, answer, vocab, seed))[0]


def vllm(folder: Path, asked: argparse.Namespace) -> beside.Run:
    import random

    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=beside.LONGEST, seed=1,
        max_num_seqs=beside.RUNNING, max_num_batched_tokens=beside.BATCHED, gpu_memory_utilization=beside.SHARE,
        tensor_parallel_size=asked.width, load_format="dummy",
    )  # fmt: skip

    def run(streams: int, prompt: int, answer: int, seed: int) -> float:
        draw, vocab = random.Random(seed), beside.SHAPES[asked.shape][0]
        prompts = [{"prompt_token_ids": [draw.randrange(10, vocab) for _ in range(prompt)]} for _ in range(streams)]
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(each.outputs[0].token_ids) for each in found) == streams * answer
        return seconds

    return run


def measure(name: str, folder: Path, asked: argparse.Namespace) -> None:
    """In this process; writes one JSON line at the end."""
    began = time.perf_counter()
    run = {"native": native, "vllm": vllm}[name](folder, asked)
    run(1, 16, 2, 7)
    ready, rates = time.perf_counter() - began, []
    for number, (streams, prompt, answer) in enumerate(rows_of(asked)):
        run(min(streams, 8), prompt, 2, 100 + number)
        seconds = min(run(streams, prompt, answer, 1000 * attempt + number) for attempt in (1, 2))
        rates.append(streams * (answer if answer > 1 else prompt) / seconds)
        print(f"{name} {streams} x {prompt} -> {answer}: {rates[-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    print(json.dumps({"name": name, "ready_s": round(ready, 1), "rates": rates}), flush=True)


def rows_of(asked: argparse.Namespace) -> tuple[tuple[int, int, int], ...]:
    return TRIED if asked.shape == "tiny" else ROWS


def write(folder: Path, asked: argparse.Namespace) -> None:
    """A checkpoint of the shape, with random weights; for vLLM alone, its configuration."""
    if "native" not in asked.engines:
        beside.config(asked.shape).save_pretrained(folder)
        return
    from tests.gpu.native import large

    made = large(beside.config(asked.shape), "cpu" if asked.device == "cpu" else "cuda")
    made.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=("native", "vllm"))
    parser.add_argument("--width", type=int, default=2, help="GPUs that share each layer")
    parser.add_argument("--shape", choices=beside.SHAPES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the native engine")
    parser.add_argument("--folder", type=Path, help="of the weights, kept for later calls; default: a temporary one")
    parser.add_argument("--here", action="store_true", help="one engine, in this process")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each engine")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.here:
        measure(asked.engines[0], asked.folder, asked)
        return
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="parallel-"))
    found: dict[str, Any] = {}
    try:
        if not (folder / "config.json").exists():
            write(folder, asked)
        for name in asked.engines:
            command = [sys.executable, "-m", "tests.gpu.parallel", name, "--here", "--folder", str(folder),
                       "--width", str(asked.width), "--shape", asked.shape, "--device", asked.device]  # fmt: skip
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=asked.timeout_s)
                (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"name"'))
                found[name] = json.loads(line)
            except (subprocess.TimeoutExpired, ValueError) as error:
                print(f"{name} gave no figures: {error!r}"[:300])
    finally:
        if asked.folder is None:
            shutil.rmtree(folder)
    print(f"| streams x prompt -> answer, width {asked.width} | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for number, (streams, prompt, answer) in enumerate(rows_of(asked)):
        cells = " | ".join(f"{each['rates'][number]:,.0f}" for each in found.values())
        print(f"| {streams} x {prompt} -> {answer if answer > 1 else '1 (prompt tokens)'} | {cells} |")
    print("ready:", {name: each["ready_s"] for name, each in found.items()})
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
