"""The native engine beside vLLM, each alone in a process of its own: the same shapes, requests, limits and GPUs.

python -m tests.gpu.beside native vllm [--shape 8b] [--width 2] [--table long] [--fp8] [--rows 3] [--json FILE]
python -m tests.gpu.beside native vllm --table wide --width 8 --shape 70b      (on four GPUs: --width 4 --fp8)

Weights are random, of the same spread in both, so that as many experts are chosen. Answers are of fixed length, and
greedy unless --sampling says otherwise. A row is timed from the first request to the last answer's end, twice; the
faster one counts. vLLM needs to be installed. With ``--width`` so many GPUs share each layer, and the native engine's
ranks load weights from a folder.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROWS = ((1, 512, 128), (32, 512, 128), (128, 512, 128), (256, 512, 128), (512, 128, 128), (64, 2048, 128),
        (64, 512, 1), (16, 2048, 1), (1, 512, 1))  # fmt: skip
LONG_ROWS = ((1, 32_000, 64), (8, 32_000, 64), (64, 8192, 64), (4, 32_000, 1), (1, 8192, 1), (1, 128_000, 64))
WIDE_ROWS = ((1, 512, 128), (32, 512, 128), (256, 512, 128), (1, 8192, 1))
TABLES: dict[str, tuple[int, tuple[tuple[int, int, int], ...]]] = {  # tokens of a sequence at most, and the rows
    "short": (4096, ROWS), "long": (131_072, LONG_ROWS), "wide": (16_384, WIDE_ROWS),
}  # fmt: skip
SHARD = 4e9  # bytes of a file of weights
RUNNING, BATCHED, SHARE = 512, 8192, 0.7
longest, table = TABLES["short"]  # set by --table
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "8b": (128256, 4096, 14336, 32, 32, 8),
    "0.3b": (32768, 1024, 4096, 16, 16, 8),
    "70b": (128256, 8192, 28672, 80, 64, 8),
    "moe": (151936, 2048, 768, 24, 32, 4),  # half of the layers of Qwen3-30B-A3B
    "30b": (151936, 2048, 768, 48, 32, 4),  # all of them
    "gpt-oss": (201088, 2880, 2880, 24, 64, 8),  # 20B
    "mla": (102400, 2048, 10944, 27, 16, 16),  # DeepSeek-V2-Lite
}
SHAPES["tiny"] = (1024, 128, 256, 2, 8, 4)  # to try the scripts
SHAPES["gpt-oss-mxfp4"] = SHAPES["gpt-oss"]  # experts as its checkpoint stores them

Run = Callable[[int, int, int, int], float]  # streams, tokens of a prompt, of an answer, seed -> seconds


def config(shape: str) -> Any:
    from transformers import DeepseekV2Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

    common: dict[str, Any] = dict(zip(SIZES, SHAPES[shape], strict=True)) | {
        "max_position_embeddings": longest, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
    }  # fmt: skip
    if shape in ("moe", "30b"):
        return Qwen3MoeConfig(
            **common, head_dim=128, moe_intermediate_size=common["intermediate_size"], num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
    if shape == "mla":
        return DeepseekV2Config(
            **common, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
            n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, n_group=1,
            topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1,
            routed_scaling_factor=1.0, first_k_dense_replace=1, architectures=["DeepseekV2ForCausalLM"],
        )  # fmt: skip
    if shape in ("gpt-oss", "gpt-oss-mxfp4"):
        stored = {"quantization_config": {"quant_method": "mxfp4"}} if shape.endswith("mxfp4") else {}
        return GptOssConfig(**common, **stored, head_dim=64, num_local_experts=32, architectures=["GptOssForCausalLM"])
    return LlamaConfig(**common, architectures=["LlamaForCausalLM"])


def random_model(shape: str) -> Any:
    import torch

    from penstock.workers.engines.native.model import quantize as mxfp4
    from tests.gpu.native import large

    with mxfp4.as_stored(config(shape)) as loaded:
        return large(loaded, "cuda" if torch.cuda.is_available() else "cpu")


def weight_bytes(shape: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16)
    return sum(each.numel() * each.element_size() for each in model.parameters())


def place(shape: str) -> Path:
    """A new folder for weights, in memory if there is room."""
    room = 1.1 * weight_bytes(shape) + 10e9
    memory = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > room else None
    return Path(tempfile.mkdtemp(prefix="shape-", dir=memory))


def write(shape: str, folder: Path) -> None:
    """The shape's random model, unless it is there."""
    if (folder / "config.json").exists():
        return
    if shape == "70b":
        write_in_parts(shape, folder)
    else:
        random_model(shape).save_pretrained(folder, max_shard_size="4GB")


def write_in_parts(shape: str, folder: Path) -> None:
    """A model that no GPU holds whole: some tensors at a time, drawn by several GPUs, eight files at once."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    made = config(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    files: list[list[str]] = [[]]
    held = 0
    for name, size in shapes.items():
        if held > SHARD:
            files.append([])
            held = 0
        files[-1].append(name)
        held += 2 * size.numel()
    devices = [f"cuda:{each}" for each in range(torch.cuda.device_count())] or ["cpu"]
    folder.mkdir(parents=True, exist_ok=True)

    def draw(number: int) -> None:
        device = devices[number % len(devices)]
        part = {
            name: torch.ones(shapes[name], dtype=torch.bfloat16)
            if "norm" in name
            else torch.empty(shapes[name], dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()
            for name in files[number]
        }
        save_file(part, folder / file_name(number), {"format": "pt"})

    def file_name(number: int) -> str:
        return f"model-{number + 1:05}-of-{len(files):05}.safetensors"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(draw, range(len(files))))
    places = {name: file_name(number) for number, names in enumerate(files) for name in names}
    total = sum(2 * size.numel() for size in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made.save_pretrained(folder)


def spread(model: Any) -> None:
    """Draw weights as ``tests.gpu.native.large`` does. What vLLM draws is so small that all rows choose alike."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(std=0.02)


def native(asked: argparse.Namespace) -> Run:
    from penstock.infra.process.gc_policy import freeze_loaded
    from penstock.schemas.requests import Sampling
    from penstock.workers.engines.native.build import assemble, build
    from penstock.workers.engines.native.cuda import rewrite
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from penstock.workers.engines.native.model.quantize import quantize
    from tests.gpu.native import ask, drive

    options = NativeOptions(
        max_running=RUNNING, max_batched_tokens=BATCHED, max_model_len=longest, warm=True,
        kv_dtype="fp8" if asked.fp8_kv else "auto", tensor_parallel_size=asked.width,
        quantization="fp8" if asked.fp8 and asked.width > 1 else "",
    )  # fmt: skip
    rewrite.ROUNDING_FP8 = 0.9  # noise of 8 bits grows from layer to layer if weights are random
    if asked.width > 1:
        engine = build(str(asked.folder), options)
    else:
        made = random_model(asked.shape)
        described = describe(made)
        if asked.fp8:
            quantize(made)
        engine = assemble(described, options)
    freeze_loaded()
    vocab = SHAPES[asked.shape][0]
    sampling = Sampling(**{"temperature": 0.0, "seed": 1} | asked.sampling)
    return lambda streams, prompt, answer, seed: drive(engine, ask(streams, prompt, answer, vocab, seed, sampling))[0]


def vllm(asked: argparse.Namespace) -> Run:
    import random

    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}  # fmt: skip
    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp(prefix="shape-")
    config(asked.shape).save_pretrained(folder)
    engine = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest,
        max_num_seqs=RUNNING, max_num_batched_tokens=BATCHED, gpu_memory_utilization=SHARE, seed=1,
        quantization="fp8" if asked.fp8 else None, kv_cache_dtype="fp8" if asked.fp8_kv else "auto",
        tensor_parallel_size=asked.width,
    )  # fmt: skip
    if not asked.fp8:
        from tests.gpu import beside  # which the engine's processes can import, too

        engine.apply_model(beside.spread)

    def run(streams: int, prompt: int, answer: int, seed: int) -> float:
        draw, vocab = random.Random(seed), SHAPES[asked.shape][0]
        prompts = [{"prompt_token_ids": [draw.randrange(10, vocab) for _ in range(prompt)]} for _ in range(streams)]
        fixed = {"max_tokens": answer, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(**{"temperature": 0.0} | asked.sampling | fixed)
        began = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(each.outputs[0].token_ids) for each in found) == streams * answer
        return seconds

    return run


def measure(name: str, asked: argparse.Namespace) -> None:
    """In this process; writes one JSON line at the end."""
    began = time.perf_counter()
    run = {"native": native, "vllm": vllm}[name](asked)
    run(1, 16, 2, 7)
    ready = time.perf_counter() - began
    rates = []
    for number, (streams, prompt, answer) in enumerate(table[: asked.rows]):
        run(min(streams, 8), prompt, 2, 100 + number)
        seconds = min(run(streams, prompt, answer, 1000 * attempt + number) for attempt in (1, 2))
        alone = f", first token after {seconds * 1e3:,.0f} ms" if (streams, answer) == (1, 1) else ""
        rates.append(streams * (answer if answer > 1 else prompt) / seconds)
        print(f"{name} {streams} x {prompt} -> {answer}: {rates[-1]:,.0f} tokens/s{alone}", file=sys.stderr, flush=True)
    print(json.dumps({"name": name, "ready_s": round(ready, 1), "rates": rates}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", nargs="+", choices=("native", "vllm"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many of the table")
    parser.add_argument("--sampling", type=json.loads, default={}, help='as JSON: {"temperature": 0.6, "top_p": 0.95}')
    parser.add_argument("--fp8", action="store_true", help="weights of 8-bit floats")
    parser.add_argument("--fp8-kv", action="store_true", help="a KV cache of 8-bit floats")
    parser.add_argument("--width", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--folder", type=Path, help="of the weights with --width, kept; default: a temporary one")
    parser.add_argument("--write", action="store_true", help="the weights of --folder only")
    parser.add_argument("--here", action="store_true", help="one engine, in this process")
    parser.add_argument("--timeout-s", type=float, default=200.0, help="of each engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", choices=TABLES, default="short", help="long: prompts of up to 128,000 tokens")
    asked = parser.parse_args()
    global longest, table
    longest, table = TABLES[asked.table]
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as memory that several GPUs write at once is not everywhere
    if asked.write:
        write(asked.shape, asked.folder)
        return
    if asked.here:
        measure(asked.engines[0], asked)
        return
    found = {}
    kept, split = asked.folder, asked.width > 1 and "native" in asked.engines
    if split:  # by a process of its own, as this one would keep memory of the GPU
        asked.folder = asked.folder or place(asked.shape)
        command = [sys.executable, "-m", "tests.gpu.beside", "native", "--write", "--shape", asked.shape,
                   "--table", asked.table, "--folder", str(asked.folder)]  # fmt: skip
        subprocess.run(command, check=True, timeout=180)
    for name in asked.engines:
        command = [sys.executable, "-m", "tests.gpu.beside", name, "--shape", asked.shape, "--rows", str(asked.rows),
                   "--here", "--width", str(asked.width), "--folder", str(asked.folder),
                   *(["--fp8"] if asked.fp8 else []), *(["--fp8-kv"] if asked.fp8_kv else []),
                   "--table", asked.table, "--sampling", json.dumps(asked.sampling)]  # fmt: skip
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            try:
                out, _ = process.communicate(timeout=asked.timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):  # vLLM's engine, which would keep the GPU's memory
                    os.killpg(process.pid, signal.SIGKILL)
            (line,) = (line for line in out.splitlines() if line.startswith('{"name"'))
            found[name] = json.loads(line)
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            print(f"{name} gave no figures but those above: {error!r}"[:300])
    if split and kept is None:
        shutil.rmtree(asked.folder, ignore_errors=True)
    print(f"| streams x prompt -> answer | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for number, (streams, prompt, answer) in enumerate(table[: asked.rows]):
        cells = " | ".join(f"{each['rates'][number]:,.0f}" for each in found.values())
        print(f"| {streams} x {prompt} -> {answer if answer > 1 else '1 (prompt tokens)'} | {cells} |")
    print("ready:", {name: each["ready_s"] for name, each in found.items()})
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
