"""``penstock models check DIR``: what a folder is, what was found in it and from where, and a prompt made with it.
``penstock models list``: the models of this machine that need no folder's name.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.cli.terminal import escape, print_hanging, stdout
from penstock.configs.flags import Parser
from penstock.infra.model import modeldir, servable, video
from penstock.infra.model.defaults import BadDefaults, context_length, defaults
from penstock.infra.model.embedding_model import describe, makes_vectors, scores_pairs
from penstock.infra.model.modeldir import ModelError
from penstock.infra.model.text_files import UnreadableTemplate, special_tokens, template_sources, token_text
from penstock.infra.model.weight_files import broken_link, is_pointer, weight_files
from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateError
from penstock.infra.text.parsers.families import prepare, reasoning_parser, tool_call_parser
from penstock.schemas.fleet import AUTO

OK, PROBLEM = 0, 1
ENGINES = ("native", "vllm", "sglang", "trtllm")
_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "problem": "[red]✗[/]"}
_WIDTH = 14
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
_SAMPLE: list[dict[str, Any]] = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "Is it warm in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call00000", "name": "get_weather"},
    {"role": "assistant", "content": "Yes, it is 21 degrees."},
    {"role": "user", "content": "Thanks!"},
]
# Conversations to show, the fullest first: templates refuse roles and orders that they do not know.
_SAMPLES: tuple[tuple[str, list[dict[str, Any]], bool], ...] = (
    ("system prompt, tools and a call", _SAMPLE, True),
    ("tools and a call", _SAMPLE[1:], True),
    ("system prompt", [_SAMPLE[0], _SAMPLE[1], *_SAMPLE[4:]], False),
    ("tools", [_SAMPLE[1]], True),
    ("two turns", [_SAMPLE[1], *_SAMPLE[4:]], False),
    ("one message", [_SAMPLE[1]], False),
)

T = TypeVar("T")


class CheckLine(NamedTuple):
    """``status``: "ok", "note" or "problem"."""

    status: str
    name: str
    text: str


class ModelReport(NamedTuple):
    """``sample``: what it shows, and the prompt; None: no template could be applied."""

    title: str
    lines: list[CheckLine]
    sample: tuple[str, str] | None = None


def run(argv: Sequence[str]) -> int:
    """Print a report; exit status 1 if no engine can serve the folder."""
    parser = Parser(
        prog="penstock models check",
        description="show a model folder's parsers, lengths, end tokens and defaults, the file that each comes from, "
        "and a prompt made by its template. Exit status: 0, or 1 if something has to be fixed first.",
    )
    parser.add_argument("model", nargs="?", default="", help="a folder, or a bundled model's name; default: demo")
    parser.add_argument("--chat-template", default="", metavar="FILE", help="a template in place of the model's own")
    parser.add_argument("--parser-families", default="", metavar="FILE", help="further formats, as for the gateway")
    args: argparse.Namespace = parser.parse_args(argv)
    console = stdout()
    try:
        prepare(args.parser_families)
        path = modeldir.resolve(args.model)
    except (ModelError, ValueError) as error:
        parser.error(str(error))
    report = check(path, args.chat_template)
    console.print(f"[bold]{escape(report.title)}[/]", highlight=False, soft_wrap=True)
    for line in report.lines:
        print_hanging(console, f"{_MARKS[line.status]} {line.name:<{_WIDTH}} ", escape(line.text))
    if report.sample is not None:
        shown, prompt = report.sample
        console.print(f"\n[bold]Example prompt[/] ({shown}):", highlight=False)
        console.print(escape(prompt), highlight=False, soft_wrap=True)
    return PROBLEM if any(line.status == "problem" for line in report.lines) else OK


def run_list(argv: Sequence[str]) -> int:
    """Print the bundled models, and those in the cache of the Hugging Face hub."""
    parser = Parser(
        prog="penstock models list",
        description="the models that come with Penstock, and those that the cache of the Hugging Face hub has on this "
        "machine: each is served with `penstock up --model NAME`, as is any folder of a model.",
    )
    parser.parse_args(argv)
    found = {name: modeldir.MODELS / name for name in modeldir.BUNDLED} | _cached()
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {_megabytes(path):>10,.1f} MB  {_kind(path)}")
    return OK


def _cached() -> dict[str, Path]:
    """Models in the cache of the Hugging Face hub, each with the folder of its latest revision."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return {}
    models = sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    latest = {repo.repo_id: max(repo.revisions, key=lambda each: each.last_modified) for repo in models}
    return {name: Path(revision.snapshot_path) for name, revision in latest.items()}


def _megabytes(path: Path) -> float:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6


def _kind(path: Path) -> str:
    """What a folder is, and what serves it, in a few words."""
    if (path / "model_index.json").is_file():
        return "a pipeline of diffusers: --diffusion 1 --diffusion-model NAME"
    engines = {engine: servable.problem(path, engine) for engine in ENGINES}
    served = [engine for engine, problem in engines.items() if not problem]
    if not served:
        return f"cannot be served: {next(iter(engines.values()))}"
    if makes_vectors(path):
        return "a model for vectors of texts"
    return f"a language model for {', '.join(served)}"


def check(path: Path, chat_template: str = "") -> ModelReport:
    """Everything that can be said of a folder. What cannot be read is a line of its own, and the rest is still said."""
    if (path / "model_index.json").is_file():
        return _pipeline(path)
    return _Check(path, chat_template).report()


def _pipeline(path: Path) -> ModelReport:
    index, problem = _read(path / "model_index.json")
    kind = str(index.get("_class_name", "unknown"))
    lines = [CheckLine("problem", "model_index", problem)] if problem else [CheckLine("ok", "pipeline", kind)]
    lines.append(CheckLine("ok", "serve with", f"penstock worker --role diffusion --model {path}"))
    return ModelReport(f"{path}: a pipeline of diffusers, for images or videos", lines)


class _Check:
    """One folder."""

    def __init__(self, path: Path, chat_template: str) -> None:
        self._path = path
        self._override = chat_template
        self._lines: list[CheckLine] = []
        self._engine = ""
        self._config = self._json("config.json", needed=True)
        self._generation = self._json("generation_config.json")
        self._special = self._json("tokenizer_config.json")

    def report(self) -> ModelReport:
        path = self._path
        if not self._config:
            self._weights()
            return ModelReport(f"{path}: no model folder, or not a whole one", self._lines)
        kind = ", ".join(map(str, self._config.get("architectures") or ())) or "none named in config.json"
        self._add("ok", "architecture", f"{kind} ({self._config.get('model_type')})")
        self._weights()
        tokenizer = self._try("tokenizer", lambda: modeldir.load_tokenizer(path))
        if tokenizer is not None:
            self._add("ok", "tokenizer", f"{tokenizer.get_vocab_size(with_added_tokens=True):,} tokens, tokenizer.json")
        length = context_length(self._config, self._special)
        self._add("ok", "length", f"{length.tokens:,} tokens: {length.source}")
        if makes_vectors(path):
            self._vectors()
            makes = "scores of pairs" if scores_pairs(path) else "vectors"
            return ModelReport(f"{path}: a model for {makes} of texts", self._lines)
        self._ends(tokenizer)
        self._defaults()
        template = self._template()
        if template is not None:
            self._parsers(template)
        sample = self._sample(template, tokenizer)
        if all(line.status != "problem" for line in self._lines):
            self._whole()
        what = "a language model" if template is not None else "a language model for texts, without chats"
        return ModelReport(f"{path}: {what}", self._lines, sample)

    def _add(self, status: str, name: str, text: str) -> None:
        self._lines.append(CheckLine(status, name, text))

    def _json(self, name: str, *, needed: bool = False) -> dict[str, Any]:
        found, problem = _read(self._path / name, needed=needed)
        if problem:
            self._add("problem", name.removesuffix(".json")[:_WIDTH], problem)
        return found

    def _try(self, name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (ModelError, BadDefaults, UnreadableTemplate, TemplateError) as error:
            self._add("problem", name, str(error))
            return None

    def _weights(self) -> None:
        files = weight_files(self._path)
        problems = {engine: servable.problem(self._path, engine) for engine in ENGINES}
        stored = servable.quantization(self._path)
        if files and not broken_link(self._path):
            size = sum(file.stat().st_size for file in files)
            form = f", quantized by {stored} ({stored.source})" if stored is not None else ""
            dtype = self._config.get("dtype") or self._config.get("torch_dtype")
            kind = f" of {dtype}" if dtype and stored is None and files[0].suffix != ".gguf" else ""
            count = f"{len(files)} files" if len(files) > 1 else files[0].name
            self._add("ok", "weights", f"{size / 1e6:,.1f} MB{kind} in {count}{form}")
        served = [engine for engine, problem in problems.items() if not problem]
        if stored is not None and stored.engines:
            served = [engine for engine in served if engine in stored.engines]
        for problem in dict.fromkeys(filter(None, problems.values())):
            self._add("note" if served else "problem", "weights", problem)
        self._engine = served[0] if served else ""
        if served:
            self._add("ok", "engines", f"can load it: {', '.join(served)}")

    def _ends(self, tokenizer: Any) -> None:
        found = {
            "generation_config.json": self._generation.get("eos_token_id"),
            "config.json": self._config.get("eos_token_id"),
            "tokenizer_config.json": token_text(self._special.get("eos_token")),
        }
        named = [f"{value!r} in {file}" for file, value in found.items() if value not in (None, "", [])]
        if not named:
            self._add("note", "end tokens", "none is named in any file: answers end at max_tokens or a stop text only")
            return
        self._add("ok", "end tokens", "; ".join(named) + self._texts_of(tokenizer, found["generation_config.json"]))

    def _texts_of(self, tokenizer: Any, ids: Any) -> str:
        listed = ids if isinstance(ids, list) else [ids]
        if tokenizer is None or not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
            return ""
        return " (" + ", ".join(repr(tokenizer.id_to_token(each)) for each in listed) + ")"

    def _defaults(self) -> None:
        found = self._try("defaults", lambda: defaults(self._generation))
        if found is None:
            return
        sampling = [
            f"{name} {value:g}"
            for name in found.sampling.__struct_fields__
            if (value := getattr(found.sampling, name)) is not None and value != getattr(type(found.sampling)(), name)
        ]
        sampling += [f"stop {text!r}" for text in found.strings]
        sampling += [f"min_tokens {found.min_tokens}"] if found.min_tokens else []
        sampling += [f"max_tokens {found.max_tokens}"] if found.max_tokens else []
        sampling += [f"{len(found.barred)} tokens barred"] if found.barred else []
        if sampling:
            self._add("ok", "defaults", f"{', '.join(sampling)}: generation_config.json")
        else:
            self._add("ok", "defaults", "none in generation_config.json" if self._generation else "no file sets any")
        if found.ignored:
            named = ", ".join(f"{key} {value!r}" for key, value in found.ignored)
            self._add("note", "defaults", f"not applied: {named}"[:300])

    def _template(self) -> ChatTemplate | None:
        sources = self._try(
            "chat template", lambda: template_sources(self._path, self._special, self._override, _object)
        )
        if sources is None:
            return None
        if sources.default is None:
            self._add("note", "chat template", "none, so chats are refused; name one with --chat-template FILE")
            return None
        default, named = sources.default, sources.named
        tokens = special_tokens(self._path, self._special, _object)
        template = self._try("chat template", lambda: ChatTemplate(default, tokens, named))
        if template is None:
            return None
        others = f", and {', '.join(sorted(named))}" if named else ""
        self._add("ok", "chat template", f"{sources.file.name}, {len(default):,} characters{others}")
        if template.needs:
            self._add("note", "chat template", f"renders nothing without {template.needs}: chats without are refused")
        used = sorted(name for name in tokens if name in default)
        if used:
            self._add("ok", "tokens in it", ", ".join(f"{name} {tokens[name]!r}" for name in used))
        return template

    def _parsers(self, template: ChatTemplate) -> None:
        suited = template.suited(tools=True)
        source = suited.source
        for name, found, flag in (
            ("reasoning", reasoning_parser(AUTO, source), "--reasoning-parser"),
            ("tool calls", tool_call_parser(AUTO, source), "--tool-call-parser"),
        ):
            if found:
                self._add("ok", name, f"{found}, by the marks in the template")
            else:
                self._add("note", name, f"no parser fits the template; if the model has them, name one with {flag}")
        if suited.omits:
            omitted = " and no ".join(suited.omits)
            self._add("note", "tool calls", f"the template writes no {omitted}; name another with --chat-template FILE")

    def _sample(self, template: ChatTemplate | None, tokenizer: Any) -> tuple[str, str] | None:
        if template is None:
            return None
        failure = ""
        for shown, messages, tools in _SAMPLES:
            suited = template.suited(tools=tools)
            try:
                text = suited.render(messages, [_TOOL] if tools else None, PromptEnd.generation)
            except TemplateError as error:
                failure = failure or f"refuses {shown}: {error}"[:300]
                continue
            if failure:
                self._add("note", "chat template", failure)
            if tokenizer is not None:
                shown += f", {len(tokenizer.encode(text, add_special_tokens=False).ids)} tokens"
            return shown, text
        self._add("note", "chat template", failure)
        return None

    def _vectors(self) -> None:
        found = self._try("vectors", lambda: describe(self._path))
        if found is not None:
            how = f"{found.pooling} pooling, texts of {found.max_tokens:,} tokens"
            if found.scores:
                how = f"{found.activation} of the score, pairs of {found.max_tokens:,} tokens (/v1/rerank, /v1/score)"
            self._add("ok", "scores" if found.scores else "vectors", how)
            self._add("ok", "serve with", f"penstock worker --role embed --model {self._path}")

    def _whole(self) -> None:
        """What only reading all of it shows."""
        model = self._try("folder", lambda: modeldir.load(self._path, chat_template=self._override))
        if model is not None:
            self._add("ok", "images", f"{model.vision.image_token}" if model.vision is not None else model.no_vision)
            if model.vision is not None and model.vision.video_token:
                found = "" if video.available() else f"; {video.MISSING}"
                self._add("note" if found else "ok", "videos", f"{model.vision.video_token}{found}")
            engine = "" if self._engine in ("", ENGINES[0]) else f" --engine {self._engine}"
            self._add("ok", "serve with", f"penstock up --model {self._path}{engine}")


def _object(file: Path) -> dict[str, Any]:
    return _read(file)[0]


def _read(file: Path, *, needed: bool = False) -> tuple[dict[str, Any], str]:
    """A file's object, and why it cannot be read."""
    if not file.is_file():
        return {}, f"{file} is missing" if needed else ""
    if is_pointer(file):
        return {}, f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]), ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        return {}, f"{file} cannot be read: {error}"
