"""The demo model's tokenizer: byte-level BPE with 1,280 tokens and one token per digit.

Held-out words are removed from its training text, so that none of them becomes a single token, whose spelling the model
could not have learned.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.demo_model.arithmetic_spelling import KNOWN
from tests.demo_model.sample import plain
from tests.demo_model.task_mix import conversation
from tests.demo_model.template import END, MARKS, SPECIAL, STOP, TEMPLATE, segments
from tests.demo_model.words import DICTIONARY, held_out

VOCAB = 1280
MAX_LEN = 8192
CONVERSATIONS = 30_000
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def corpus(count: int, seed: int) -> Iterator[str]:
    rng = Random(f"tokenizer {seed}")
    excluded = {word for word in (*DICTIONARY, *map(str.lower, KNOWN)) if held_out("word", word)}
    marks = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKS))))
    for _ in range(count):
        sample, messages = conversation(rng)
        if sample.task in ("needle", "copying"):
            continue
        text = plain("".join(text for text, _ in segments(messages, sample.tools)))
        words = re.sub(r"[A-Za-z]+", lambda word: "" if word[0].lower() in excluded else word[0], text)
        yield marks.sub(" ", words)


def write_tokenizer(directory: Path, seed: int, conversations: int = CONVERSATIONS) -> None:
    """Train it and save tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(conversations, seed), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    tokenizer.add_special_tokens(list(SPECIAL))
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens instead of {VOCAB}: the corpus is too small")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": STOP,
        "model_max_length": MAX_LEN,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
