"""``lm-eval`` on tasks of its own, as no data set can be downloaded: sums, generated and as a choice of answers."""

import json
import os
import random
import tempfile
from pathlib import Path

from commands import run_tool
from harness import BASE, KEY, MODEL, check, run

TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
"""
GENERATED = """
task: sums
output_type: generate_until
doc_to_text: "What is {{a}} + {{b}}?"
doc_to_target: "{{a + b}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 20, do_sample: false, temperature: 0}
filter_list: [{name: last, filter: [{function: regex, regex_pattern: "= (\\\\d+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
task: choices
output_type: multiple_choice
doc_to_text: "<|im_start|>user\\nWhat is {{a}} + {{b}}?<|im_end|>\\n<|im_start|>assistant\\n{{a}} + {{b}} ="
doc_to_choice: "{{[(a + b) | string, (a + b + 1) | string, (a + b + 30) | string, (a + b - 7) | string]}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def score(task: str, text: str, model: str, arguments: str, *flags: str) -> dict[str, float]:
    """What lm-eval says of eight sums."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sums = folder / "sums.jsonl"
        sums.write_text("".join(json.dumps({k: rng.randint(100, 499) for k in "ab"}) + "\n" for _ in range(8)))
        (folder / "task.yaml").write_text(text + COMMON % sums)
        run_tool(
            "lm-eval", "run", "--include_path", name, "--tasks", task, "--model", model, "--model_args",
            f"model={MODEL},{arguments}", "--output_path", str(folder / "out"), *flags,
            HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf"), OPENAI_API_KEY=KEY,
        )  # fmt: skip
        found = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    return found["results"][task]


@check("chat", "local-chat-completions, four at once: every sum is right")
def chat() -> None:
    arguments = f"base_url={BASE}/chat/completions,num_concurrent=4"
    found = score("sums", GENERATED, "local-chat-completions", arguments, "--apply_chat_template")
    assert found["exact_match,last"] == 1.0


@check("completions", "local-completions, batches of four prompts: every sum is right")
def batches() -> None:
    arguments = f"base_url={BASE}/completions,tokenizer={TOKENIZER},num_concurrent=2"
    flags = ("--batch_size", "4", "--apply_chat_template")
    assert score("sums", GENERATED, "local-completions", arguments, *flags)["exact_match,last"] == 1.0


@check(
    "logprobs", "local-completions, a choice by echo and logprobs, batches of four: the right one has the best score"
)
def choices() -> None:
    arguments = f"base_url={BASE}/completions,tokenizer={TOKENIZER},num_concurrent=2"
    assert score("choices", CHOSEN, "local-completions", arguments, "--batch_size", "4")["acc,none"] == 1.0


run("lm-eval", limit_s=200)
