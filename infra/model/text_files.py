"""A model's tokenizer and chat templates from the files that its folder has.

A tokenizer is tokenizer.json, or a byte-level BPE that others read: Mistral's ``tekken.json`` and the
``tiktoken.model`` of Kimi list tokens by rank. They become a tokenizer of the library that reads tokenizer.json, with
the same tokens: adjacent parts are merged lowest rank first, as tiktoken does it.

Of the places that makers use for a template, the first with one counts: an override, chat_template.jinja,
tokenizer_config.json, chat_template.json, processor_config.json. ``additional_chat_templates/NAME.jinja`` add to it.
"""

import ast
import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as InOrder
from tokenizers.processors import TemplateProcessing

FAST, TEKKEN, TIKTOKEN, SENTENCEPIECE = "tokenizer.json", "tekken.json", "tiktoken.model", "tokenizer.model"
_RESERVED = 256  # special tokens after the vocabulary of Kimi's


class BadTokenizer(ValueError):
    """A tokenizer's file cannot be used; the text names it and what to do."""


class _Entry(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_Entry]
    special_tokens: list[_Special] | None = None


def file_of(path: Path) -> Path | None:
    """The file that a folder's tokenizer is read from; None: there is none that can be."""
    return next((path / name for name in (FAST, TEKKEN, TIKTOKEN) if (path / name).is_file()), None)


def read(path: Path) -> Tokenizer:
    """
    Raises:
        BadTokenizer: see there.
        Exception: of the library's, about a tokenizer.json.
    """
    file = file_of(path)
    if file is None:
        if (path / SENTENCEPIECE).is_file():
            raise BadTokenizer(
                f'{path} has {SENTENCEPIECE} alone; write a {FAST} beside it: python -c "from transformers import '
                f"AutoTokenizer as T; T.from_pretrained('{path}').save_pretrained('{path}')\" (needs sentencepiece)"
            )
        raise BadTokenizer(f"{path / FAST} is missing; only models with it, {TEKKEN} or {TIKTOKEN} can be served")
    if file.name == FAST:
        return Tokenizer.from_file(str(file))
    try:
        return _tekken(file) if file.name == TEKKEN else _tiktoken(file)
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, OSError, ValueError) as error:
        raise error if isinstance(error, BadTokenizer) else BadTokenizer(f"{file} cannot be read: {error}") from error


def named(path: Path) -> Mapping[str, str]:
    """Special tokens that templates name, of a folder whose tokenizer's file implies them."""
    file = file_of(path)
    return {"bos_token": "<s>", "eos_token": "</s>"} if file is not None and file.name == TEKKEN else {}


def _tekken(file: Path) -> Tokenizer:
    found = msgspec.json.decode(file.read_bytes(), type=_Tekken)
    config, special = found.config, found.special_tokens
    if not special:
        raise BadTokenizer(f"{file} names no special tokens, as files before 2025 do; use a folder with {FAST}")
    first = config.default_num_special_tokens
    texts = {each.rank: each.token_str for each in special}
    names = [texts.get(at, f"<SPECIAL_{at}>") for at in range(first)]
    ranks = {base64.b64decode(each.token_bytes, validate=True): each.rank for each in found.vocab}
    kept = {token: rank for token, rank in ranks.items() if rank < config.default_vocab_size - first}
    tokenizer = _byte_level(kept, config.pattern, names, [])
    if "<s>" in names:
        begin = names.index("<s>")
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
        )
    return tokenizer


def _tiktoken(file: Path) -> Tokenizer:
    ranks = {}
    for line in file.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    config = file.parent / "tokenizer_config.json"
    added = msgspec.json.decode(config.read_bytes(), type=dict[str, Any]).get("added_tokens_decoder") or {}
    texts = {int(token): str(each["content"]) for token, each in added.items()}
    behind = range(len(ranks), len(ranks) + _RESERVED)
    return _byte_level(ranks, _pattern(file.parent), [], [texts.get(at, f"<|reserved_token_{at}|>") for at in behind])


def _byte_level(ranks: Mapping[bytes, int], pattern: str, before: Sequence[str], behind: Sequence[str]) -> Tokenizer:
    """
    Args:
        before, behind: special tokens with the ids below and above those of the ranks.
    """
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2, …")
    characters = _characters()
    written = {token: "".join(characters[each] for each in token) for token in ranks}
    vocabulary = dict(zip(before, range(len(before)), strict=True))
    vocabulary |= {written[token]: rank + len(before) for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocabulary, list(_merges(ranks, written)), ignore_merges=True))
    parts: list[PreTokenizer] = [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = InOrder(parts)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (*before, *behind)])
    return tokenizer


def _merges(ranks: Mapping[bytes, int], written: Mapping[bytes, str]) -> Iterator[tuple[str, str]]:
    """Pairs that become one token, by its rank, and those of one token by the ranks of their parts."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        for _, _, left, right in sorted(known):
            yield written[left], written[right]


def _characters() -> dict[int, str]:
    """The character that byte-level tokenizers write for each byte: itself where it can be seen, else one above 255."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [each for each in range(256) if each not in seen]
    return {each: chr(each) for each in seen} | {each: chr(256 + at) for at, each in enumerate(others)}


def _pattern(folder: Path) -> str:
    """The expression that splits texts, from the source of the folder's own tokenizer, which is read and not run."""
    for file in sorted(folder.glob("tokenization_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Assign) or not any(_is_pattern(each) for each in node.targets):
                continue
            value = node.value
            if isinstance(value, ast.Call) and value.args:  # "|".join([...])
                value = value.args[0]
            try:
                parts = ast.literal_eval(value)
            except ValueError:
                continue
            return parts if isinstance(parts, str) else "|".join(parts)
    raise BadTokenizer(f"{folder} has {TIKTOKEN} without the tokenization_*.py that says how texts are split (pat_str)")


def _is_pattern(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "pat_str"


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
        reason = getattr(error, "strerror", None) or error
        raise UnreadableTemplate(f"chat template {file} cannot be read: {reason}") from error
