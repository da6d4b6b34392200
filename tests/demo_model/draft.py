"""Measures the acceptance rate of a draft model: ``python -m tests.demo_model.draft MODEL DRAFT``.

The reference is the demo model's greedy answers to held-out questions. Both models have the same tokenizer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.demo_model.score import greedy
from tests.demo_model.task_mix import TASKS, cases
from tests.demo_model.template import prompt

DRAFT_LENGTH = 4  # tokens drafted per step of the demo model


def accepted(draft: Any, prompt: list[int], answer: list[int]) -> list[bool]:
    """For each token of the answer, whether the draft model predicts it from the tokens before."""
    tokens = torch.tensor([prompt + answer], device=draft.device)
    with torch.inference_mode():
        guesses = draft(tokens, logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1)
    return [guess == token for guess, token in zip(guesses.tolist(), answer, strict=True)]


def tokens_per_step(accepted: list[bool], guesses: int = DRAFT_LENGTH) -> float:
    """Tokens per step of the large model, if each step verifies ``guesses`` drafted tokens."""
    steps = place = 0
    while place < len(accepted):
        right = 0
        while right < guesses and place + right < len(accepted) and accepted[place + right]:
            right += 1
        place += right + 1
        steps += 1
    return len(accepted) / max(1, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--count", type=int, default=100, help="questions per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(options.model / "tokenizer.json"))
    model, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
        for path in (options.model, options.draft)
    )
    table: dict[str, dict[str, float]] = {}
    for task in TASKS:
        prompts = [
            tokenizer.encode(prompt(sample.messages, sample.tools), add_special_tokens=False)
            for sample in cases(task, options.count, options.seed)
        ]
        rows = [
            accepted(draft, ids, answer) for ids, answer in zip(prompts, greedy(model, tokenizer, prompts), strict=True)
        ]
        share = sum(map(sum, rows)) / sum(map(len, rows))
        table[task] = {"acceptance": round(share, 4), "tokens_per_step": round(sum(map(len, rows)) / sum(
            len(row) / tokens_per_step(row) for row in rows), 2)}  # fmt: skip
        print(f"{task:12} {table[task]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
