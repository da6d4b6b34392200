import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.chat_template import ChatTemplate, TemplateError
from configs.modeldir import ModelError, load, resolve, revision
from schemas.requests import Sampling
from tests.tiny_model import CHATML, write


def edit(file: Path, **values: object) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **values}))


def test_a_directory_tells_its_limits_and_end_tokens(tmp_path: Path) -> None:
    model = load(write(tmp_path / "some-model"))
    assert (model.name, model.max_model_len, model.vocab_size) == ("some-model", 2048, 640)
    assert model.eos_token_ids == (0, 2)  # generation_config.json's, then the tokenizer's own <|im_end|>
    assert model.sampling == Sampling()


def test_limits_of_a_multimodal_model_are_its_language_models(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "generation_config.json").unlink()
    text = {"max_position_embeddings": 77, "vocab_size": 700, "eos_token_id": [5, 6]}
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 1, "text_config": text}))
    model = load(path)
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (77, 700, (5, 6, 2))


def test_rope_scaling_lengthens_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    edit(path / "config.json", rope_scaling=scaling)
    assert load(path).max_model_len == 8192


def test_the_models_own_sampling_defaults_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    edit(path / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert load(path).sampling == Sampling(temperature=0.6, top_p=0.9, top_k=20)
    edit(path / "generation_config.json", do_sample=False)
    assert load(path).sampling.temperature == 0.0


def test_revision_follows_content_and_not_place(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    assert revision(one) == revision(two)
    (two / "model.safetensors").write_bytes(b"12")
    weights = revision(two)
    assert weights != revision(one)
    (two / "model.safetensors").write_bytes(b"123")
    assert revision(two) not in (weights, revision(one))
    edit(one / "config.json", hidden_size=2)
    assert revision(one) != revision(write(tmp_path / "three"))


def test_a_hub_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    path = write(tmp_path / "models--some--model" / "snapshots" / "0123abcd")
    model = load(path)
    assert (model.name, model.revision) == ("some/model", "0123abcd")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, file: str) -> None:
    path = write(tmp_path)
    (path / file).write_text("{")
    with pytest.raises(ModelError, match=file):
        load(path)
    (path / file).unlink()
    with pytest.raises(ModelError, match=f"{file} is missing"):
        load(path)


def test_what_is_neither_a_directory_nor_an_id_is_refused() -> None:
    with pytest.raises(ModelError, match="not a directory"):
        resolve("./no/such/directory")


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]


def test_a_template_renders_messages_up_to_the_assistants_turn(tmp_path: Path) -> None:
    template = load(write(tmp_path)).template
    assert template is not None
    assert template.render(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_file_beside_the_tokenizer_wins_over_its_config(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = load(path).template
    assert template is not None
    assert template.render(MESSAGES[1:]) == "Hi <b>!"


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": CHATML}]
    path = write(tmp_path)
    edit(path / "tokenizer_config.json", chat_template=named)
    template = load(path).template
    assert template is not None
    assert template.render(MESSAGES).endswith("assistant\n")


def test_an_override_replaces_the_models_template(tmp_path: Path) -> None:
    path, file = write(tmp_path / "m"), tmp_path / "mine.jinja"
    file.write_text("{{ bos_token or '' }}[{{ messages[-1]['content'] }}]{{ eos_token }}")
    template = load(path, chat_template=str(file)).template
    assert template is not None
    assert template.render(MESSAGES) == "[Hi <b>]<|im_end|>"


@pytest.mark.parametrize("source", ["{% for %}", "{{ raise_exception('never') }}", "{{ messages[0].content.x.y }}"])
def test_an_override_that_cannot_render_is_refused_at_start(tmp_path: Path, source: str) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    with pytest.raises(ModelError, match=r"mine\.jinja cannot be used"):
        load(write(tmp_path / "m"), chat_template=str(file))


def test_an_override_that_is_missing_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.jinja cannot be read"):
        load(write(tmp_path), chat_template=str(tmp_path / "gone.jinja"))


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load(write(tmp_path, template=None)).template is None


def test_a_template_that_wants_parts_gets_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}", {}
    )
    assert template.wants_parts
    assert template.render(MESSAGES) == "Be brief.Hi <b>"


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}", {})


def test_reading_a_model_directory_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from configs.modeldir import load\n"
        f"assert load(Path({str(write(tmp_path))!r})).template.render([{{'role': 'user', 'content': 'x'}}])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=60)
    assert done.stdout.split() == ["False", "True"]
