"""``penstock models check``: what a folder is and lacks, each said in a line, whatever else is wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import commands
from penstock.infra.model import video
from penstock.infra.model.modeldir import DEMO
from penstock.operate.check_model import ModelReport, check
from tests.workers.engines.native import qwen_vl

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def edit(file: Path, **values: Any) -> None:
    found = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def said(report: ModelReport, name: str) -> list[tuple[str, str]]:
    return [(line.status, line.text) for line in report.lines if line.name == name]


def problems(report: ModelReport) -> list[str]:
    return [line.name for line in report.lines if line.status == "problem"]


def test_a_whole_folder_has_no_problem_and_shows_a_prompt(folder: Path) -> None:
    report = check(folder)
    assert report.title.endswith(": a language model")
    assert not problems(report)
    assert said(report, "length") == [("ok", "8,192 tokens: max_position_embeddings in config.json")]
    assert said(report, "tool calls") == [("ok", "hermes, by the marks in the template")]
    assert said(report, "defaults") == [("ok", "temperature 0: generation_config.json")]
    ((_, ends),) = said(report, "end tokens")
    assert "in generation_config.json" in ends
    assert "'<|im_end|>'" in ends
    assert report.sample is not None
    shown, prompt = report.sample
    assert "tokens" in shown
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "get_weather" in prompt


def test_a_model_that_takes_videos_needs_the_library_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(qwen_vl.write(tmp_path))
    assert not problems(report)
    assert said(report, "images") == [("ok", "<|image_pad|>")]
    assert said(report, "videos") == [("ok", "<|video_pad|>")]
    monkeypatch.setattr(video, "available", lambda: False)
    assert said(check(tmp_path), "videos") == [("note", f"<|video_pad|>; {video.MISSING}")]


def test_without_a_template_it_serves_texts_only(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    report = check(folder)
    assert report.title.endswith("for texts, without chats")
    assert said(report, "chat template")[0][0] == "note"
    assert report.sample is None
    assert not problems(report)
    (folder / "mine.jinja").write_text("{{ messages[-1].content }}!")
    report = check(folder, str(folder / "mine.jinja"))
    assert report.sample is not None
    assert report.sample[1] == "Thanks!!"


@pytest.mark.parametrize(
    ("name", "content", "line", "text"),
    [
        ("tokenizer.json", "{", "tokenizer", "cannot be read"),
        ("tokenizer.json", POINTER, "tokenizer", "Git LFS pointer"),
        ("model.safetensors", POINTER, "weights", "Git LFS pointer"),
        ("model.safetensors", "", "weights", "cut off"),
        ("config.json", POINTER, "config", "Git LFS pointer"),
        ("config.json", None, "config", "is missing"),
        ("generation_config.json", '{"top_k": "many"}', "defaults", "must be a number"),
        ("chat_template.jinja", "{% for %}", "chat template", "TemplateSyntaxError"),
        ("chat_template.jinja", b"\xff", "chat template", "cannot be read"),
    ],
)
def test_each_broken_file_is_a_line(folder: Path, name: str, content: str | bytes | None, line: str, text: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    report = check(folder)
    assert set(problems(report)) == {line}
    assert any(text in each for status, each in said(report, line) if status == "problem")
    assert name.startswith("config") or said(report, "length")


def test_gguf_alone_names_the_engines_that_read_it(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    report = check(folder)
    assert said(report, "engines") == [("ok", "can load it: vllm, sglang, trtllm")]
    assert said(report, "serve with") == [("ok", f"penstock up --model {folder} --engine vllm")]


def test_an_empty_folder_and_other_kinds_are_named(tmp_path: Path) -> None:
    assert problems(check(tmp_path)) == ["config", "weights"]
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert check(tmp_path).title.endswith("a pipeline of diffusers, for images or videos")


def test_a_cross_encoder_is_named_with_its_endpoints(folder: Path) -> None:
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"], id2label={"0": "relevant"})
    report = check(folder)
    assert report.title.endswith("a model for scores of pairs of texts")
    ((status, text),) = said(report, "scores")
    assert (status, text.startswith("Sigmoid of the score, pairs of ")) == ("ok", True)
    assert said(report, "serve with") == [("ok", f"penstock worker --role embed --model {folder}")]


def test_what_a_template_refuses_or_needs_is_said(folder: Path) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    (folder / "chat_template.jinja").write_text(source)
    report = check(folder)
    assert next(text for status, text in said(report, "chat template") if status == "note").endswith("no system")
    assert report.sample is not None
    (folder / "chat_template.jinja").write_text("{% for t in tools %}{{ t.type }}{% endfor %}{{ messages[0].content }}")
    assert any("without tools" in text for _, text in said(check(folder), "chat template"))


def test_what_a_template_never_writes_is_said(folder: Path) -> None:
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    for source, omitted in (
        (texts, "no tools and no calls"),
        (texts + calls, "no tools"),
        ("{{ tools }}" + texts, "no calls"),
    ):
        (folder / "chat_template.jinja").write_text(source)
        expected = f"the template writes {omitted}; name another with --chat-template FILE"
        assert ("note", expected) in said(check(folder), "tool calls")


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_prints_it_and_exits_by_it(folder: Path, capsys: pytest.CaptureFixture[str], wrong: bool) -> None:
    if wrong:
        (folder / "tokenizer.json").write_text("{")
    assert commands.main(["models", "check", str(folder)]) == int(wrong)
    out = capsys.readouterr().out
    assert "chat template" in out
    assert ("✗ tokenizer" in out) is wrong


def test_what_is_no_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["models", "check", "./nowhere"])
    assert ended.value.code == 2
    assert "is not a directory" in capsys.readouterr().err


def test_the_list_has_bundled_models_and_those_of_the_hub_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    snapshots = tmp_path / "models--some--model" / "snapshots"
    shutil.copytree(DEMO, snapshots / ("0" * 40))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    half = tmp_path / "models--some--half" / "snapshots" / ("1" * 40)
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert commands.main(["models", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["demo", "demo-vision", "tiny", "some/half", "some/model"]
    assert "a language model for native" in lines["some/model"]
    assert "cannot be served" in lines["some/half"]
