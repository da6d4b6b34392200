"""Tokenizers of tekken.json and tiktoken.model, against merging by rank as tiktoken does it, written out plainly."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir, text_files
from penstock.infra.model.modeldir import ModelError
from penstock.infra.model.text_files import BadTokenizer
from tests.properties import examples
from tests.tiny_model import write

PARTS = [r" ?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r"\s+"]
# Some are no merge of two others ("hello"), some can be made in two ways ("abc").
WORDS = ["he", "ll", "hell", "lo", "hello", " h", "ab", "bc", "abc", "é", "日本", "  ", "the", " the", "th", "in"]
TOKENS = [*(bytes([each]) for each in range(256)), *(each.encode() for each in WORDS)]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
RESERVED = 10
PIECES = [*"abcdehilnort  \n19é日本!", "hello", "the", "abc"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=20)


def by_rank(text: str) -> list[int]:
    """Ranks of a text's tokens: of all adjacent pairs, that of the lowest rank is merged first."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    found: list[int] = []
    for part in regex.findall("|".join(PARTS), text):
        pieces = [bytes([each]) for each in part.encode()]
        if part.encode() in ranks:
            pieces = [part.encode()]
        while True:
            merged = [(ranks.get(left + right), at) for at, (left, right) in enumerate(pairwise(pieces))]
            possible = [(rank, at) for rank, at in merged if rank is not None]
            if not possible:
                break
            _, at = min(possible)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        found += [ranks[each] for each in pieces]
    return found


def tekken(path: Path, **changes: Any) -> Path:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(TOKENS)]
    vocab.append({"rank": len(TOKENS), "token_bytes": base64.b64encode(b"beyond").decode()})  # the size cuts it off
    config = {
        "pattern": "|".join(PARTS),
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(TOKENS) + RESERVED,
        "default_num_special_tokens": RESERVED,
        "version": "v11",
    }
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    path.mkdir(exist_ok=True)
    file = path / "tekken.json"
    file.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special} | changes))
    return path


def tiktoken(path: Path, source: str = f"class Own:\n    pat_str = '|'.join({PARTS!r})\n") -> Path:
    path.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(TOKENS)]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(TOKENS)): {"content": "[BOS]"}, str(len(TOKENS) + 3): {"content": "<|im_end|>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (path / "tokenization_own.py").write_text(source)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("tokenizers")
    return tekken(path / "tekken"), tiktoken(path / "tiktoken")


@examples(100)
@given(TEXT)
def test_tokens_are_merged_by_rank(folders: tuple[Path, Path], text: str) -> None:
    mistral, kimi = map(text_files.read, folders)
    wanted = by_rank(text)
    assert mistral.encode(text).ids == [1, *(RESERVED + rank for rank in wanted)]
    assert kimi.encode(text).ids == wanted
    assert mistral.decode(mistral.encode(text).ids) == kimi.decode(wanted) == text.encode().decode()


def test_special_tokens_have_the_ids_that_the_files_give_them(folders: tuple[Path, Path]) -> None:
    mistral, kimi = map(text_files.read, folders)
    assert mistral.get_vocab_size() == len(TOKENS) + RESERVED
    names = [*SPECIAL, *(f"<SPECIAL_{at}>" for at in range(4, 10))]
    assert [mistral.id_to_token(at) for at in range(RESERVED)] == names
    assert mistral.encode("[INST]hello</s>").ids[1] == 3
    base = len(TOKENS)
    assert kimi.get_vocab_size() == base + 256
    names = ["[BOS]", f"<|reserved_token_{base + 1}|>", "<|im_end|>"]
    assert [kimi.id_to_token(base + at) for at in (0, 1, 3)] == names
    assert kimi.encode("hello<|im_end|>").ids == [*by_rank("hello"), base + 3]


@pytest.mark.parametrize("make", [tekken, tiktoken])
def test_a_folder_without_tokenizer_json_is_a_model(make: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    before = modeldir.load(make(path), name="m")
    assert before.tokenizer.encode("hello", add_special_tokens=False).ids
    assert before.detokenizer is not None
    (file,) = [each for each in path.iterdir() if each.name in ("tekken.json", "tiktoken.model")]
    file.write_bytes(file.read_bytes() + b"\n")
    after = modeldir.load(path, name="m")
    assert after.revision != before.revision
    assert after.tokenizer_digest != before.tokenizer_digest


def test_templates_of_mistrals_own_format_know_its_first_and_last_token(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).unlink()
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    model = modeldir.load(tekken(path))
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "hello"}]) == "<s>hello</s>"
    assert 2 in model.eos_token_ids


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: tekken(path, special_tokens=None), "names no special tokens"),
        (lambda path: tekken(path, vocab=[{"rank": 0}]), "tekken.json cannot be read"),
        (lambda path: tekken(path, vocab=[{"rank": 0, "token_bytes": "?"}]), "tekken.json cannot be read"),
        (lambda path: tiktoken(path, "pat_str = compute()"), "without the tokenization_"),
        (lambda path: tiktoken(path, "x = 1"), "pat_str"),
        (lambda path: (tiktoken(path) / "tiktoken.model").write_text("a b c"), "tiktoken.model cannot be read"),
        (lambda path: (path.mkdir(), (path / "tokenizer.model").write_bytes(b"x")), "tokenizer.model alone"),
        (lambda path: path.mkdir(), "tokenizer.json is missing"),
    ],
)
def test_files_that_cannot_be_read_are_named(make: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make(path)
    with pytest.raises(BadTokenizer, match=words):
        text_files.read(path)
    with pytest.raises(ModelError, match=words):
        modeldir.load_tokenizer(path)
