import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import (
    MODELS,
    ModelDir,
    ModelError,
    Vision,
    load,
    resolve,
    revision,
    tokenizer_digest,
)
from penstock.infra.text.chat_template import ChatTemplate, TemplateError
from penstock.schemas.requests import Sampling
from tests.tiny_model import CHATML, write


def edit(file: Path, **values: object) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **values}))


def test_a_directory_has_its_limits_and_end_tokens(tmp_path: Path) -> None:
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


def test_rope_scaling_lengthens_what_a_user_may_ask_for(tmp_path: Path) -> None:
    path = write(tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    edit(path / "config.json", rope_scaling=scaling)
    model = load(path)
    assert (model.max_model_len, model.length.limit(8192)) == (2048, 8192)


def test_the_models_own_sampling_defaults_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    edit(path / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert load(path).sampling == Sampling(temperature=0.6, top_p=0.9, top_k=20)
    edit(path / "generation_config.json", do_sample=False)
    assert load(path).sampling.temperature == 0.0


def test_an_empty_list_of_end_tokens_leaves_them_to_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path)
    edit(path / "config.json", eos_token_id=[7.0, 8])
    edit(path / "generation_config.json", eos_token_id=[])
    assert load(path).eos_token_ids == (7, 8, 2)


def test_a_default_of_another_type_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    edit(path / "generation_config.json", top_k=20.0, no_repeat_ngram_size=3)
    assert load(path).sampling.top_k == 20
    assert load(path).defaults.ignored == (("no_repeat_ngram_size", 3),)
    edit(path / "generation_config.json", top_k="many")
    with pytest.raises(ModelError, match=r"generation_config\.json: top_k is 'many'"):
        load(path)


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


def test_other_weights_of_the_same_size_are_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "one")
    weights = bytearray(random.Random(1).randbytes(300_000))
    (path / "model.safetensors").write_bytes(weights)
    for sampled in (False, True):
        if sampled:  # as of a model that is too large to be read as a whole: the front, the end and parts between
            monkeypatch.setattr(modeldir, "WHOLE_BYTES", 1000)
            monkeypatch.setattr(modeldir, "SAMPLE_BYTES", 1000)
            monkeypatch.setattr(modeldir, "SAMPLES", 300)
        seen = {revision(path)}
        for at in (0, 150_000, 299_999):
            changed = weights.copy()
            changed[at] ^= 1
            (path / "model.safetensors").write_bytes(changed)
            seen.add(revision(path))
        assert len(seen) == 4
        (path / "model.safetensors").write_bytes(weights)
        assert revision(path) in seen


def test_a_tokenizer_is_named_by_what_it_does_and_not_by_how_its_file_is_written(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    described = json.loads((two / "tokenizer.json").read_text())
    described["truncation"] = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    (two / "tokenizer.json").write_text(json.dumps(dict(reversed(described.items())), indent=4))
    assert tokenizer_digest(one) == tokenizer_digest(two) == load(two).tokenizer_digest
    described["added_tokens"][0]["content"] = "<|other|>"
    (two / "tokenizer.json").write_text(json.dumps(described))
    assert tokenizer_digest(one) != tokenizer_digest(two)


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
    with pytest.raises(ModelError, match=r"gone\.jinja cannot be read: No such file"):
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


def test_reading_a_model_directory_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.infra.model.modeldir import load\n"
        f"assert load(Path({str(write(tmp_path))!r})).template.render([{{'role': 'user', 'content': 'x'}}])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=60)
    assert done.stdout.split() == ["False", "False"]


LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 1,
    "text_config": {"hidden_size": 48},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}


def sees(path: Path, *, processor: dict[str, Any] | None = None, images: Any = None, **config: Any) -> ModelDir:
    edit(write(path) / "config.json", **{**LLAVA, **config})
    if processor is not None:
        edit(path / "processor_config.json", **processor)
    if images is not None:
        edit(path / "preprocessor_config.json", **images)
    return load(path)


def test_the_bundled_vision_model_describes_its_images() -> None:
    assert resolve("demo-vision") == MODELS / "demo-vision"
    assert load(resolve("demo-vision")).vision == Vision("<image>", 1279, 64, 256)


def test_a_model_without_vision_says_why(tmp_path: Path) -> None:
    model = load(write(tmp_path))
    assert (model.vision, model.no_vision) == (None, "model type 'llama' takes no images")
    other = sees(tmp_path / "b", model_type="mllama")
    assert other.vision is None
    assert "'mllama' is a vision model that Penstock does not" in other.no_vision


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


@pytest.mark.parametrize(
    ("tower", "strategy", "processor", "tokens"),
    [
        (CLIP, None, None, 576),
        (CLIP, "default", {"num_additional_image_tokens": 1}, 576),
        (CLIP, "full", None, 577),
        (CLIP, "full", {"num_additional_image_tokens": 1}, 577),
        (SIGLIP, "full", None, 576),
        (SIGLIP, "full", {"num_additional_image_tokens": 0}, 576),
    ],
)
def test_tokens_per_image_follow_from_the_patches(
    tmp_path: Path, tower: str, strategy: str | None, processor: dict[str, Any] | None, tokens: int
) -> None:
    config = {"vision_config": {**LLAVA["vision_config"], "model_type": tower}}
    if strategy:
        config["vision_feature_select_strategy"] = strategy
    model = sees(tmp_path, processor=processor, image_seq_length=tokens, **config)
    assert model.vision == Vision("<|im_start|>", 1, tokens, 48), model.no_vision


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"image_seq_length": 577}, "image_seq_length 577, its vision tower makes 576"),
    ({"processor": {"num_additional_image_tokens": 3}, "image_seq_length": 576}, "makes 578"),
    ({"images": {"crop_size": {"height": 224, "width": 224}}}, "the vision tower takes 336"),
    ({"images": {"crop_size": 224}}, "the vision tower takes 336"),
    ({"images": {"do_center_crop": False, "size": {"height": 224, "width": 224}}}, "the vision tower takes 336"),
    ({"image_token_index": 10_000}, "do not match tokenizer.json"),
    ({"image_token_index": None}, "do not match tokenizer.json"),
    ({"processor": {"image_token": "<picture>"}}, "'<picture>' and its id 1"),
    ({"vision_config": {}}, "image_size None"),
    ({"vision_config": {"image_size": 10, "patch_size": 0}}, "patch_size 0"),
    ({"vision_config": None}, "no vision_config"),
]


@pytest.mark.parametrize(("files", "reason"), CONTRADICTIONS)
def test_files_that_contradict_each_other_give_no_vision_but_a_reason(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    model = sees(tmp_path, **files)
    assert model.vision is None
    assert reason in model.no_vision


def test_a_processor_that_agrees_is_taken(tmp_path: Path) -> None:
    images = {"do_center_crop": True, "crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    model = sees(tmp_path, images=images, processor={"image_token": {"content": "<|im_start|>"}}, text_config={})
    assert model.vision == Vision("<|im_start|>", 1, 576, 0)
