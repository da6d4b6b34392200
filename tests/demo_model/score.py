"""Held-out accuracy without a server, through transformers: ``python -m tests.demo_model.score MODEL``.

With ``--vision``, it asks questions about images, which go through the model's own processor. This is for use during
training; the published figures are those of ``penstock eval demo``, which asks a running gateway.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoProcessor, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from penstock.infra.model.weight_files import key_mapping
from tests.demo_model import task_mix, vision
from tests.demo_model.sample import Sample, right, valid_json
from tests.demo_model.template import END, IMAGE, STOP, prompt

_BATCH_TOKENS = 400_000
_BATCH_IMAGES = 100


def answers(model: Any, tokenizer: PreTrainedTokenizerFast, samples: list[Sample], new: int = 640) -> list[str]:
    """Greedy answers, in the samples' order."""
    prompts = [tokenizer.encode(prompt(sample.messages, sample.tools), add_special_tokens=False) for sample in samples]
    outputs = greedy(model, tokenizer, prompts, new)
    return [tokenizer.decode(ids, skip_special_tokens=False).removesuffix(STOP) for ids in outputs]


def greedy(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], new: int = 640) -> list[list[int]]:
    """The tokens generated after each prompt, including the end token."""
    stop, pad = tokenizer.convert_tokens_to_ids([STOP, END])
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    while order:
        longest = len(prompts[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, _BATCH_TOKENS // (longest + new))))]
        rows = [prompts[i] for i in batch]
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=mask, max_new_tokens=new)
        for i, row in zip(batch, output[:, longest:].tolist(), strict=True):
            outputs[i] = row[: row.index(stop) + 1] if stop in row else row
    return outputs


def image_answers(model: Any, processor: Any, samples: list[Sample], new: int = 80) -> list[str]:
    """Greedy answers to questions about images, in the samples' order."""
    answers: list[str] = []
    for begin in range(0, len(samples), _BATCH_IMAGES):
        batch = samples[begin : begin + _BATCH_IMAGES]
        texts = [prompt(((role, text.replace(IMAGE * vision.TOKENS, IMAGE)),)) for [(role, text)] in
                 (sample.messages for sample in batch)]  # fmt: skip
        inputs = processor(
            images=[vision.draw(sample.scene) for sample in batch], text=texts, padding=True, padding_side="left",
            return_tensors="pt",
        ).to(model.device, model.dtype)  # fmt: skip
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=new)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        answers += [processor.tokenizer.decode(row, skip_special_tokens=False).partition(STOP)[0] for row in rows]
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=400, help="questions per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=4, help="wrong answers to show per task")
    parser.add_argument("--vision", action="store_true", help="MODEL is a vision model: ask questions about images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    kind: Any = LlavaForConditionalGeneration if options.vision else AutoModelForCausalLM
    names = dict(key_mapping(options.model)) or None
    model = kind.from_pretrained(options.model, dtype=dtype, key_mapping=names).to(device).eval()
    if options.vision:
        reader: Any = AutoProcessor.from_pretrained(options.model)
    else:
        reader = PreTrainedTokenizerFast(tokenizer_file=str(options.model / "tokenizer.json"))
    table: dict[str, float] = {}
    for task in vision.TASKS if options.vision else task_mix.TASKS:
        samples = (vision if options.vision else task_mix).cases(task, options.count, options.seed)
        texts = (image_answers if options.vision else answers)(model, reader, samples)
        good = [right(sample, text) for sample, text in zip(samples, texts, strict=True)]
        table[task] = sum(good) / len(good)
        if task == "json":
            valid = [valid_json(sample, text) for sample, text in zip(samples, texts, strict=True)]
            table["json valid"] = sum(valid) / len(valid)
            print(f"{'json valid':12} {table['json valid']:.4f}")
        print(f"{task:12} {table[task]:.4f}", flush=True)
        wrong = [(s, t) for s, t, ok in zip(samples, texts, good, strict=True) if not ok][: options.wrong]
        for sample, text in wrong:
            print(f"    {sample.messages[-1][1][-120:]!r} -> {text[:160]!r}, not {sample.want!r}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
