"""Templates and special tokens are found wherever makers put them, as transformers finds them."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model.text_files import UnreadableTemplate, special_tokens, template_sources


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def write(path: Path, **files: Any) -> dict[str, Any]:
    """Files of a folder, by name without ending; returns tokenizer_config.json."""
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return dict(files.get("tokenizer_config", {}))


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]


@pytest.mark.parametrize(
    ("files", "file", "default", "named"),
    [
        ({}, "chat_template.jinja", None, {}),
        ({"tokenizer_config": {"chat_template": "a"}}, "tokenizer_config.json", "a", {}),
        ({"chat_template": {"chat_template": "b"}}, "chat_template.json", "b", {}),
        ({"processor_config": {"chat_template": "c"}}, "processor_config.json", "c", {}),
        (
            {"tokenizer_config": {"chat_template": "a"}, "processor_config": {"chat_template": "c"}},
            "tokenizer_config.json",
            "a",
            {},
        ),
        ({"tokenizer_config": {"chat_template": NAMED}}, "tokenizer_config.json", "d", {"tool_use": "t", "rag": "r"}),
        ({"chat_template": {"chat_template": {"x": "1", "y": "2"}}}, "chat_template.json", "1", {"x": "1", "y": "2"}),
        ({"processor_config": {"chat_template": NAMED[1:2]}}, "processor_config.json", "t", {"tool_use": "t"}),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}, "x", 3]}}, "tokenizer_config.json", None, {}),
    ],
)
def test_the_first_place_with_a_template_counts(
    tmp_path: Path, files: dict[str, Any], file: str, default: str | None, named: dict[str, str]
) -> None:
    found = template_sources(tmp_path, write(tmp_path, **files), "", read_json)
    assert (found.file.name, found.default, found.named) == (file, default, named)


def test_files_of_their_own_go_before_and_add_to_the_default(tmp_path: Path) -> None:
    config = write(tmp_path, tokenizer_config={"chat_template": "a"})
    (tmp_path / "chat_template.jinja").write_text("ü")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("n")
    assert template_sources(tmp_path, config, "", read_json) == (
        tmp_path / "chat_template.jinja",
        "ü",
        {"tool_use": "t"},
    )
    (tmp_path / "mine.jinja").write_text("m")
    assert template_sources(tmp_path, config, str(tmp_path / "mine.jinja"), read_json)[1:] == ("m", {})


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(UnreadableTemplate, match=Path(name).name):
        template_sources(tmp_path, {}, "", read_json)


def test_special_tokens_come_from_both_files(tmp_path: Path) -> None:
    older = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "additional_special_tokens": ["<x>"],
    }
    config = write(tmp_path, special_tokens_map=older, tokenizer_config={"eos_token": "<end>", "unk_token": None})
    assert special_tokens(tmp_path, config, read_json) == {"bos_token": "<s>", "eos_token": "</s>"}
    config = write(tmp_path, tokenizer_config={"eos_token": "<end>", "added_tokens_decoder": {}})
    assert special_tokens(tmp_path, config, read_json) == {"bos_token": "<s>", "eos_token": "<end>"}


def test_tokens_of_the_models_own_have_their_names(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        tokenizer_config={"image_token": "<image>", "extra_special_tokens": {"boi_token": "<boi>"}, "pad_token": 3},
    )
    assert special_tokens(tmp_path, config, read_json) == {"image_token": "<image>", "boi_token": "<boi>"}


def test_special_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    end = {"__type": "AddedToken", "content": "<end>"}
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "<end>": 2}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    for files in ({"tokenizer_config": config}, {"tokenizer_config": {}, "special_tokens_map": {"bos_token": "<s>"}}):
        found = special_tokens(tmp_path, write(tmp_path, **files), read_json)
        assert found == dict(PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map)
