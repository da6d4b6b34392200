"""The bundled model, as transformers and as the native engine see it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model.tiny import make
from tests.workers.engines.native.conftest import TINY
from tests.workers.engines.native.models import request, run, tokens

PROSE = """Many people ask the same question at the same time, and the system must decide which machine should answer
each of them. A good design keeps the memory of earlier messages close to the place where the next answer is made, so
that it can begin quickly. Please write a short story about a fox that lives near a quiet river and learns how to build
a bridge for the other animals. The first day was warm, but in the night the wind came from the north and the water
rose. What would you do if the only road to the village was closed and your best friend waited on the other side?"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def test_it_is_small_enough_to_be_shipped() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 2_000_000


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "你好，世界！ 今天天气很好。",
        "🎉👩‍👩‍👧 naïve café Ünïcödé",
        "  two blanks\n\n\ttab 12345.67 don't",
        "\x00\x7f\ufffd",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 4096


def test_english_takes_little_more_than_a_token_per_word(tokenizer: Any) -> None:
    assert 1.1 < len(tokenizer(PROSE)["input_ids"]) / len(PROSE.split()) < 1.6


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nAdd.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with_tools = tokenizer.apply_chat_template(messages, tokenize=False, tools=[{"type": "function", "function": {}}])
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert with_tools.count("Be brief.") == 1
    with pytest.raises(Exception, match="roles are"):
        tokenizer.apply_chat_template([{"role": "judge", "content": ""}], tokenize=False)


def test_special_tokens_are_single_and_end_answers(tokenizer: Any) -> None:
    ids = [tokenizer(text)["input_ids"] for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[4093], [4094], [4095]]
    assert set(build(str(TINY), NativeOptions(device="cpu", kv_blocks=1)).info.eos_token_ids) == {4093, 4095}


def test_the_engine_answers_as_transformers(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROSE}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    engine = build(str(TINY), NativeOptions(device="cpu", kv_blocks=16))
    ours = tokens(run(engine, [request(0, prompt, 32)]))[0]
    assert ours == theirs[0, len(prompt) :].tolist()
    assert len(set(ours)) > 16
    assert engine.info.max_model_len == 131072


def test_the_script_makes_the_files_that_are_shipped(tmp_path: Path) -> None:
    make(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in TINY.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name
