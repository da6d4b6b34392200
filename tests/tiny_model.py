"""A model directory without weights: a byte-level BPE tokenizer trained on the spot, ChatML, Llama-like limits."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The broker keeps every request in an ordered log, and the router reads the log to steer the next request. "
    "A worker takes the prompt, computes its blocks and streams one token after another to the gateway. "
    "Grüße aus Köln, naïve façade, 東京の天気は晴れです, привет мир, emoji 🙂🚀👩‍👩‍👧, math ∑∞≠. "
) * 4


@cache
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens([AddedToken("<think> x", special=False)])
    return str(tokenizer.to_str())


@cache
def metaspace_json() -> str:
    """SentencePiece-like: "▁" for blanks, single bytes as <0x..> tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS[:200]], trainer)
    spec = json.loads(tokenizer.to_str())
    for entry in spec["added_tokens"]:
        entry["special"] = not entry["content"].startswith("<0x")
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["special"]]
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(spec)


def write(path: Path, *, max_len: int = 2048, template: str | None = CHATML, tokenizer: str = "") -> Path:
    """Write the directory and return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer or byte_level_json(), encoding="utf-8")
    config = {"model_type": "llama", "vocab_size": 640, "max_position_embeddings": max_len, "eos_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    special = {"eos_token": "<|im_end|>", "model_max_length": 1e30, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    return path
