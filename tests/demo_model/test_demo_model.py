"""The demo model's data, tokenizer and training: the same everywhere, honest about what is held out, and it learns."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.infra.model import modeldir
from tests.demo_model import arithmetic_spelling, facts, recall, small_talk, task_mix
from tests.demo_model.sample import Sample, plain, right, valid_json
from tests.demo_model.template import IMAGE, STOP, prompt, segments
from tests.demo_model.words import held_out
from tests.properties import examples

DEMO = modeldir.MODELS / "demo"
SPLIT = [13, 32, 39]  # of 12 + n, n from 10 to 39
SEEDS = st.integers(0, 2**32)


def as_messages(sample: Sample) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in sample.messages]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@given(SEEDS)
@examples(200)
def test_the_same_seed_gives_the_same_conversation_and_its_answer_is_right(seed: int) -> None:
    sample, messages = task_mix.conversation(Random(seed))
    assert (sample, messages) == task_mix.conversation(Random(seed))
    assert right(sample, plain(sample.answer))
    assert messages[-1] == ("assistant", sample.answer)


@pytest.mark.parametrize("task", task_mix.TASKS)
def test_evaluation_questions_repeat_with_their_seed_and_have_right_answers(task: str) -> None:
    samples = task_mix.cases(task, 40, 5)
    assert samples == task_mix.cases(task, 40, 5)
    assert samples != task_mix.cases(task, 40, 6)
    assert all(right(sample, plain(sample.answer)) for sample in samples)
    assert not any(right(sample, "") or right(sample, "4711 nonsense") for sample in samples)


def test_known_sums_and_words_are_on_the_side_of_the_split_they_were_measured_on() -> None:
    # The card's figures hold only as long as the split is this one.
    found = [held_out("sum", 12, "+", b) for b in range(10, 40)]
    assert [10 + i for i, held in enumerate(found) if held] == SPLIT
    share = sum(held_out("word", str(i)) for i in range(5000)) / 5000
    assert 0.08 < share < 0.12


@given(SEEDS)
def test_training_never_asks_a_held_out_sum_and_the_evaluation_only_such(seed: int) -> None:
    for held in (False, True):
        sample = arithmetic_spelling.arithmetic(Random(seed), held)
        a, sign, b = sample.answer.split()[:3]
        if sign in "+-":
            assert held_out("sum", int(a), sign, int(b)) == held


@given(SEEDS)
def test_training_never_spells_a_held_out_word_and_the_evaluation_only_such(seed: int) -> None:
    for make in (arithmetic_spelling.spelling, arithmetic_spelling.reversing, arithmetic_spelling.counting):
        for held in (False, True):
            word = make(Random(seed), held).answer.partition(" ")[0].rstrip(":").replace("-", "")
            assert held_out("word", word) == held


def test_held_out_questions_about_penstock_are_never_trained_on() -> None:
    rng = Random(1)
    asked = {facts.facts(rng, True).messages[0][1] for _ in range(4000)}
    trained = {facts.facts(rng, False).messages[0][1] for _ in range(60_000)}
    assert len(asked) > 500
    assert asked.isdisjoint(trained)
    assert len(facts.FACTS) >= 60
    assert len({fact.answer for fact in facts.FACTS}) == len(facts.FACTS)


def test_values_to_look_up_are_held_out_and_once_in_their_context() -> None:
    for sample in task_mix.cases("needle", 10, 1):
        kinds = ("number", "value")
        value = int(sample.want) if sample.want.isdigit() else sample.want
        assert any(held_out(kind, value) for kind in kinds)
        assert right(sample, sample.answer)


def test_the_longest_contexts_have_about_four_thousand_tokens(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(prompt(sample.messages)).ids) for sample in task_mix.cases("needle", 12, 3)]
    assert 3900 < max(lengths) < 6144
    assert recall.LONGEST > 4000


def test_refusals_are_of_words_that_no_fact_is_about() -> None:
    rng = Random(2)
    for _ in range(300):
        assert small_talk.unknown(rng, True).answer == small_talk.UNKNOWN


@pytest.mark.parametrize("task", task_mix.TASKS)
def test_training_and_the_chat_template_write_the_same_prompt(task: str) -> None:
    template = modeldir.load(DEMO).template
    assert template is not None
    for sample in task_mix.cases(task, 10, 4):
        rendered = template.render(as_messages(sample), list(sample.tools) or None)
        assert rendered == prompt(sample.messages, sample.tools)


def test_the_chat_template_drops_old_thoughts_writes_calls_and_places_pictures() -> None:
    template = modeldir.load(DEMO).template
    assert template is not None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = template.render(
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThat."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        enable_thinking=True,
    )
    assert f"{IMAGE}\nWhat?{STOP}" in text
    assert f"assistant\nThat.{STOP}" in text
    assert f'assistant\n<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}</tool_call>{STOP}' in text
    assert text.endswith("assistant\n<think>\n")


@given(SEEDS)
@examples(50)
def test_pieces_of_a_conversation_tokenise_apart_as_they_do_joined(seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    sample, messages = task_mix.conversation(Random(seed))
    pieces = [plain(text) for text, _ in segments(messages, sample.tools)]
    apart = [token for piece in pieces for token in tokenizer.encode(piece).ids]
    assert apart == tokenizer.encode("".join(pieces)).ids


def test_no_held_out_word_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    from tests.demo_model.words import DICTIONARY

    words = {*DICTIONARY, *arithmetic_spelling.KNOWN}
    whole = [word for word in words if held_out("word", word) and len(tokenizer.encode(f" {word}").ids) == 1]
    assert len(whole) <= 5, whole


@pytest.mark.parametrize(
    ("answer", "is_valid", "is_right"),
    [
        ('{"name": "Ada", "age": 3}', True, True),
        ('{"age": 3, "name": "Ada"}', True, True),
        ('{"name": "Bob", "age": 3}', True, False),
        ('{"name": "Ada", "age": "3"}', False, False),
        ('{"name": "Ada"}', False, False),
        ('{"name": "Ada", "age": 3', False, False),
        ("Ada is 3", False, False),
    ],
)
def test_json_counts_as_valid_by_its_shape_and_right_by_its_values(answer: str, is_valid: bool, is_right: bool) -> None:
    sample = Sample("json", (), "", {"name": "Ada", "age": 3})
    assert (valid_json(sample, answer), right(sample, answer)) == (is_valid, is_right)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', True),
        ('<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>', False),
        ('{"name": "f", "arguments": {"a": 1}}', False),
        ('Sure! <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', False),
    ],
)
def test_a_tool_call_is_right_only_whole_and_in_its_marks(answer: str, is_right: bool) -> None:
    assert right(Sample("tools", (), "", {"name": "f", "arguments": {"a": 1}}), answer) == is_right


def test_a_batch_is_full_repeats_and_weighs_answers_only_fully(tokenizer: Tokenizer) -> None:
    from tests.demo_model.batches import LONGEST, Batches

    batches = Batches(str(DEMO / "tokenizer.json"), 3, 16_384, 5, pictures=False)
    first, again = batches[2], batches[2]
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, batches[3].tokens)
    assert len(first.tokens) == 16_384 == first.short[-1] + first.long[-1]
    assert np.diff(first.long).max() <= LONGEST
    said = tokenizer.decode(first.tokens[first.weights == 1].tolist(), skip_special_tokens=False)
    assert STOP in said
    assert "<|im_start|>" not in said


BATCH = ("--smoke", "--batch-tokens", "3072")


@pytest.fixture(scope="module")
def short_contexts() -> Iterator[None]:
    """The longest conversations have 1024 tokens instead of 6144, and training takes one thread."""
    torch = pytest.importorskip("torch")
    from tests.demo_model import batches, train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "LONGEST", 1024)
        patch.setattr(train, "LONGEST", 1024)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(short_contexts: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny training run that stopped once and went on."""
    from tests.demo_model import train

    work = tmp_path_factory.mktemp("work")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / name).write_bytes((DEMO / name).read_bytes())
    flags = ["--work", str(work), *BATCH, "--steps", "8", "--rate", "5e-3"]
    first = train.run(train.options_of([*flags, "--minutes", "0"]))
    assert first["step"] == 1
    return work, train.run(train.options_of(flags))


def test_a_smoke_training_continues_where_it_stopped_and_its_loss_falls(trained: tuple[Path, dict[str, Any]]) -> None:
    work, state = trained
    assert state["step"] == 8
    assert all(file.stat().st_size < 16 << 20 for file in work.iterdir())
    assert state["losses"][-1][1] < 0.95 * np.log(1280)


@pytest.mark.parametrize("broken", ["weights", "rest", "exp_avg_sq", "state.json"])
def test_an_interrupted_save_leaves_the_one_before(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    import shutil

    from tests.demo_model import checkpoint, train

    work = shutil.copytree(trained[0], tmp_path / "work")
    before = checkpoint.weights_of(work)
    move = Path.replace

    def fail(file: Path, target: Path) -> Path:
        if file.name.startswith(broken):
            raise KeyboardInterrupt
        return move(file, target)

    flags = ["--work", str(work), *BATCH, "--steps", "9", "--rate", "5e-3"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):  # in the save behind the step
            train.run(train.options_of([*flags, "--save-minutes", "0"]))
    assert checkpoint.state_of(work)["step"] == 8
    assert all(before[name].equal(weight) for name, weight in checkpoint.weights_of(work).items())
    assert train.run(train.options_of(flags))["step"] == 9
    assert sorted(file.name for file in work.glob("*.safetensors*")) == [
        f"{part}-9.safetensors" for part in ("exp_avg", "exp_avg_sq", "rest", "weights")
    ]


def test_a_new_training_begins_with_anothers_weights(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from tests.demo_model import checkpoint, train

    flags = ["--work", str(tmp_path), *BATCH, "--steps", "1", "--rate", "0"]
    assert train.run(train.options_of([*flags, "--start", str(trained[0])]))["step"] == 1
    before, after = checkpoint.weights_of(trained[0]), checkpoint.weights_of(tmp_path)
    assert all(before[name].equal(weight) for name, weight in after.items())


def test_the_bundled_models_are_one_and_a_training_can_begin_with_their_weights() -> None:
    import torch

    from penstock.infra.model import modeldir
    from tests.demo_model import train
    from tests.demo_model.model import VISION, Demo, Shape
    from tests.demo_model.tokenizer import VOCAB

    names = list(Demo(Shape(VOCAB, **VISION)).state_dict())
    seeing = train.starting_weights(modeldir.MODELS / "demo-vision", names)
    text = train.starting_weights(modeldir.MODELS / "demo", [name for name in names if name.startswith("model.")])
    assert len(text) < len(seeing) == len(names)
    assert all(torch.equal(weight, seeing[name]) for name, weight in text.items())
    with pytest.raises(ValueError, match=r"no weights for vision"):
        train.starting_weights(modeldir.MODELS / "demo", [name for name in names if name.startswith("vision.")][:1])


def test_a_vision_model_whose_text_weights_are_stored_elsewhere_is_joined_again(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from penstock.infra.model import modeldir
    from tests.demo_model.shared_weights import join, share

    join(modeldir.MODELS / "demo-vision", tmp_path / "seeing")
    join(modeldir.MODELS / "demo", tmp_path / "text")
    whole = load_file(tmp_path / "seeing" / "model.safetensors")
    assert whole.keys() > {"language_model.model.embed_tokens.weight", "multi_modal_projector.linear_1.weight"}
    share(tmp_path / "seeing", tmp_path / "text")
    for name in ("vision.safetensors", "model.safetensors.index.json"):
        assert (tmp_path / "seeing" / name).stat().st_size < 4_000_000
    join(tmp_path / "seeing", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == whole.keys()
    assert all(torch.equal(weight, whole[name]) for name, weight in again.items())
    again["language_model.model.norm.weight"] += 1
    save_file(again, tmp_path / "again" / "model.safetensors")
    with pytest.raises(ValueError, match="different text weights"):
        share(tmp_path / "again", tmp_path / "text")


def test_models_are_averaged_weight_by_weight(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from tests.demo_model.average import average

    for name, value in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2, 3), value)}, tmp_path / name / "model.safetensors")
    average(tmp_path / "old", tmp_path / "new", tmp_path / "out", 0.75)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].unique().tolist() == [1.75]
    save_file({"w": torch.ones(3)}, tmp_path / "new" / "model.safetensors")
    with pytest.raises(ValueError, match="different weights"):
        average(tmp_path / "old", tmp_path / "new", tmp_path / "out", 0.75)


def test_training_saves_while_it_runs(short_contexts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.demo_model import checkpoint, train

    saved: list[int] = []
    monkeypatch.setattr(checkpoint, "save", lambda directory, model, optimizer, state: saved.append(state["step"]))
    flags = ["--work", str(tmp_path), *BATCH, "--steps", "2"]
    train.run(train.options_of([*flags, "--save-minutes", "0"]))
    assert saved == [1, 2, 2]
    assert (tmp_path / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()


def test_what_is_exported_computes_the_same_in_transformers(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.demo_model.export import export
    from tests.demo_model.model import Demo, Shape, places_of

    work, state = trained
    export(work, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path)("What is 12 + 30? Spell gateway.")["input_ids"]
    ours = Demo(Shape(**state["shape"]))
    ours.load_state_dict(theirs.state_dict(), strict=False)
    twice = torch.tensor(ids + ids)  # two conversations in one batch do not see each other
    parts = ((len(twice), torch.tensor([0, len(ids), 2 * len(ids)], dtype=torch.int32), 64),)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
        found = ours.logits(ours.model.embed_tokens(twice), places_of(parts), parts)
    torch.testing.assert_close(found[: len(ids)], wanted, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[len(ids) :], wanted, atol=1e-4, rtol=1e-3)


def test_the_bundled_model_is_small_and_answers(tokenizer: Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    assert (DEMO / "model.safetensors").stat().st_size <= 12_000_000
    assert json.loads((DEMO / "generation_config.json").read_text())["do_sample"] is False
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for question, answer in (("What is 123 + 456?", "123 + 456 = 579"), ("Spell gateway.", "g-a-t-e-w-a-y")):
        ids = torch.tensor([tokenizer.encode(prompt((("user", question),))).ids])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)[0, ids.shape[1] :]
        assert tokenizer.decode(said.tolist()) == answer


def test_an_evaluation_asks_over_http_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.demo_model import evaluate

    sample = Sample("tools", (("user", "?"),), "", {"name": "f", "arguments": {"a": 1}})
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert right(sample, evaluate.text_of({"content": None, "tool_calls": [call]}))
    thought = evaluate.text_of({"reasoning_content": "hm", "content": "12"})
    assert right(Sample("thinking", (), "", 12), thought)
    rows = evaluate.scores_of("json", [Sample("json", (), "", {"a": 1})] * 2, ['{"a": 1}', '{"a": 2}'], 1.0)
    assert [(row.task, row.accuracy) for row in rows] == [("json: valid", 1.0), ("json: right", 0.5)]
    with pytest.raises(evaluate.EvalFailed, match="unknown task nonsense"):
        evaluate.evaluate(None, evaluate.Settings(tasks=("nonsense",)))  # type: ignore[arg-type]


def test_a_checkpoint_with_the_earlier_names_of_its_shape_is_read(tmp_path: Path) -> None:
    from tests.demo_model import checkpoint

    shape = {"hidden": 256, "eyes": 192, "eye_layers": 4, "eye_heads": 4}
    (tmp_path / "state.json").write_text(json.dumps({"step": 3, "shape": shape}), encoding="utf-8")
    read = {"hidden": 256, "vision_hidden": 192, "vision_layers": 4, "vision_heads": 4}
    assert checkpoint.state_of(tmp_path) == {"step": 3, "shape": read}
