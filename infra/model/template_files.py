"""Where a model directory keeps its chat templates, and the special tokens that these refer to.

Of the places that makers use, the first with a template counts: an override, chat_template.jinja,
tokenizer_config.json, chat_template.json, processor_config.json. ``additional_chat_templates/NAME.jinja`` add to it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT = "default"
_EXTRA = "extra_special_tokens"  # by name; also a list of texts, which have no names

ReadJson = Callable[[Path], Mapping[str, Any]]  # {} if there is no such file


class TemplateSources(NamedTuple):
    """
    Attributes:
        file: where the default template is.
        default: None: the model has no template.
        named: the others, "tool_use" and "rag" among them.
    """

    file: Path
    default: str | None
    named: dict[str, str]


class UnreadableTemplate(Exception):
    """A file with a template cannot be read; the text names it."""


def template_sources(path: Path, tokenizer: Mapping[str, Any], override: str, read_json: ReadJson) -> TemplateSources:
    """
    Args:
        tokenizer: what tokenizer_config.json has.
        override: a file that replaces all of the model's templates.
    Raises:
        UnreadableTemplate: a file is not text.
    """
    if override:
        file = Path(override).expanduser()
        return TemplateSources(file, _text(file), {})
    file, found = _found(path, tokenizer, read_json)
    named = _named(found)
    named |= {each.stem: _text(each) for each in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if not named:
        return TemplateSources(file, None, {})
    default = named.pop(_DEFAULT, None)
    if default is None:
        default = next(iter(named.values()))
    return TemplateSources(file, default, named)


def special_tokens(path: Path, tokenizer: Mapping[str, Any], read_json: ReadJson) -> dict[str, str]:
    """Texts by name, as ``apply_chat_template`` gives them to templates.

    From tokenizer_config.json, where names of a model's own end in "_token" or are listed apart, and, in folders whose
    configuration lists no added tokens, from special_tokens_map.json, which then goes before.
    """
    values: dict[str, Any] = {key: value for key, value in tokenizer.items() if key.endswith("_token")}
    sources = [tokenizer]
    older = read_json(path / "special_tokens_map.json")
    if "added_tokens_decoder" not in tokenizer:
        values |= {key: value for key, value in older.items() if key.endswith("_token")}
        sources.append(older)
    else:  # a file that was edited by hand may have the one and not the other
        values = {key: value for key, value in older.items() if key in SPECIAL_TOKENS} | {
            key: value for key, value in values.items() if value is not None
        }
    for source in sources:
        if isinstance(extra := source.get(_EXTRA), dict):
            values |= extra
    return {key: text for key, value in values.items() if (text := token_text(value))}


def token_text(value: Any) -> str:
    """The text of a special token, which files write as text or as {"content": text}; "": it is none."""
    text = value.get("content", "") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _found(path: Path, tokenizer: Mapping[str, Any], read_json: ReadJson) -> tuple[Path, Any]:
    own = path / "chat_template.jinja"
    if own.is_file():
        return own, _text(own)
    if (value := tokenizer.get("chat_template")) is not None:
        return path / "tokenizer_config.json", value
    for name in ("chat_template.json", "processor_config.json"):
        if (value := read_json(path / name).get("chat_template")) is not None:
            return path / name, value
    return own, None


def _named(value: Any) -> dict[str, str]:
    """Templates by name: of a text, a list of {"name", "template"}, or an object."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    if isinstance(value, dict):
        return {name: text for name, text in value.items() if isinstance(name, str) and isinstance(text, str)}
    return {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTemplate(f"chat template {file} cannot be read: {error}") from error
