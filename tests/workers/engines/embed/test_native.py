"""The native embedding engine, against the same computed with plain transformers, one text at a time."""

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
)

from penstock.infra.model import embedding_model
from penstock.infra.model.modeldir import ModelError
from penstock.schemas.requests import PAIRS, Embedding
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.embed import embedding_protocol
from penstock.workers.engines.embed.embedding_protocol import MARGIN, SECOND, shortened
from penstock.workers.engines.embed.native import NativeEmbeddingEngine
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.runners import embedding_runner
from penstock.workers.runners.embedding_runner import inputs_of
from tests import tiny_model
from tests.properties import examples

TEXTS = ["The router reads the log.", "A worker", "streams one token after another to the gateway, again and again."]
SIZES: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with special tokens around each text."""
    path: Path = tmp_path_factory.mktemp("encoder") / "bert"
    torch.manual_seed(1)
    BertModel(BertConfig(**SIZES, max_position_embeddings=40)).save_pretrained(path)
    spec = json.loads(tiny_model.byte_level_json())
    spec["post_processor"] = {
        "type": "BertProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1],
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("decoder") / "qwen"
    torch.manual_seed(2)
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(tiny_model.byte_level_json())
    return path


def engine(path: Path) -> NativeEmbeddingEngine:
    return NativeEmbeddingEngine(path, device="cpu", threads=1)


def hidden(path: Path, tokens: list[int]) -> Tensor:
    """(tokens, dimensions), of one text alone."""
    with torch.inference_mode():
        return AutoModel.from_pretrained(path)(input_ids=torch.tensor([tokens])).last_hidden_state[0]


def vectors(packed: list[bytes]) -> Tensor:
    return torch.stack([torch.tensor(array("f", each)) for each in packed])


def pooled(name: str) -> dict[str, Any]:
    return {"pooling_mode": name, "embedding_dimension": 32}


OLD = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
POOLED = {
    "cls": lambda h: h[0],
    "mean": lambda h: h.mean(0),
    "max": lambda h: h.amax(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / sum(range(1, len(h) + 1)),
    "lasttoken": lambda h: h[-1],
}


@pytest.mark.parametrize("how", POOLED)
@pytest.mark.parametrize("normalized", [True, False])
def test_a_batch_of_an_encoder_equals_each_text_alone(
    encoder: Path, tmp_path: Path, how: str, normalized: bool
) -> None:
    for file in encoder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    modules = [{"idx": i, "path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(OLD if how == "cls" else pooled(how)))
    made = engine(tmp_path)
    tokens = made.tokenize(TEXTS)
    assert all((each[0], each[-1]) == (1, 2) for each in tokens)
    wanted = torch.stack([POOLED[how](hidden(encoder, each)) for each in tokens])
    if normalized:
        wanted = wanted / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(vectors(made.embed(tokens)), wanted, atol=1e-5)


def test_a_decoder_gives_the_normalised_vector_of_the_last_token(decoder: Path) -> None:
    made = engine(decoder)
    tokens = made.tokenize(TEXTS)
    last = torch.stack([hidden(decoder, each)[-1] for each in tokens])
    assert torch.allclose(vectors(made.embed(tokens)), last / last.norm(dim=1, keepdim=True), atol=1e-5)
    assert (made.embedder.pooling, made.embedder.dimensions, made.embedder.max_tokens) == ("lasttoken", 32, 64)


def test_texts_that_are_too_long_are_refused_or_cut_before_their_last_special_token(encoder: Path) -> None:
    made = engine(encoder)
    text = "a worker takes the prompt " * 9
    whole = made.tokenize([text])[0]
    assert len(whole) > 40 == made.embedder.max_tokens
    with pytest.raises(RequestError, match=rf"input\[1\] has {len(whole)} tokens; this model takes 40"):
        inputs_of(made, Embedding(32, texts=("a", text)), b"")
    (cut,) = inputs_of(made, Embedding(32, texts=(text,), truncate=12), b"")
    assert cut == [*whole[:11], whole[-1]]
    assert len(made.embed([cut])[0]) == 4 * 32


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenized(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(encoder)
    text = "a worker takes the prompt " * 4000
    whole = made.tokenizer.encode(text).ids
    read: list[int] = []
    counting = Counting(made.tokenizer, read)
    monkeypatch.setattr(made, "tokenizer", counting)
    for truncate in (40, 12):
        (cut,) = inputs_of(made, Embedding(32, texts=(text,), truncate=truncate), b"")
        assert cut == [*whole[: truncate - 1], whole[-1]]
    with pytest.raises(RequestError, match=r"input\[0\] has at least \d+ tokens; this model takes 40"):
        inputs_of(made, Embedding(32, texts=(text,)), b"")
    assert sum(read) < len(text) / 10


def test_a_text_whose_beginning_has_few_tokens_is_read_on(encoder: Path) -> None:
    made = engine(encoder)
    text = "<|im_end|>" * 200 + "a worker"  # 10 characters each
    whole = made.tokenizer.encode(text).ids
    assert made.tokenize([text, "a"], 40)[0] == [*whole[:39], whole[-1]]
    assert len(made.tokenize([text])[0]) > 40 + MARGIN


def test_many_long_texts_are_tokenized_a_few_at_a_time(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(encoder)
    read: list[int] = []
    monkeypatch.setattr(made, "tokenizer", Counting(made.tokenizer, read))
    monkeypatch.setattr(embedding_runner, "CHUNK", 100)
    texts = tuple(f"{number} a worker" for number in range(50))
    inputs = inputs_of(made, Embedding(32, texts=texts), b"")
    assert inputs == made.tokenize(texts)
    assert max(read[:-1]) < 120


class Counting:
    """A tokenizer that notes how many characters it is given at once."""

    def __init__(self, tokenizer: Any, read: list[int]) -> None:
        self._tokenizer = tokenizer
        self._read = read

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self._read.append(sum(map(len, texts)))
        return self._tokenizer.encode_batch(texts, **options)

    def encode(self, text: str, **options: Any) -> Any:
        raise AssertionError("it keeps the interpreter's lock, so that the worker loses its lease")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_token_ids_are_taken_as_they_are(encoder: Path) -> None:
    given = Embedding(32, lengths=(2, 1))
    assert inputs_of(engine(encoder), given, pack_tokens([7, 8, 9])) == [[7, 8], [9]]


def test_shortened_vectors_have_length_1_and_the_direction_of_the_beginning() -> None:
    vector = torch.tensor([3.0, 4.0, 12.0])
    short = torch.tensor(array("f", shortened(vector.numpy().tobytes(), 2)))
    assert torch.allclose(short, torch.tensor([0.6, 0.8]))
    assert shortened(vector.numpy().tobytes(), 3) == vector.numpy().tobytes()
    assert shortened(bytes(12), 2) == bytes(8)


def test_a_module_that_is_not_known_is_refused_by_its_name(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(encoder / "config.json")
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": "a.b.LSTM"}]))
    with pytest.raises(ModelError, match=r"module 'LSTM'; Transformer, Pooling, Dense and Normalize are supported"):
        engine(tmp_path)


PROMPTS = {"query": "task: search | query: ", "Clustering": "task: clustering | "}


@pytest.fixture
def layered(encoder: Path, tmp_path: Path) -> Path:
    """As EmbeddingGemma: two dense layers behind the pooling, and prompts."""
    for file in encoder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    modules = [{"idx": i, "path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooled("mean")))
    layer(tmp_path / "2_Dense", 32, 48, "torch.nn.modules.linear.Identity", bias=False)
    layer(tmp_path / "3_Dense", 48, 24, "torch.nn.modules.activation.Tanh", bias=True)
    optional(tmp_path, prompts=PROMPTS, default_prompt_name=None)
    return tmp_path


def layer(folder: Path, inputs: int, outputs: int, activation: str, *, bias: bool) -> None:
    folder.mkdir()
    named = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(named))
    torch.manual_seed(inputs)
    tensors = {"linear.weight": torch.randn(outputs, inputs)}
    save_file(tensors | ({"linear.bias": torch.randn(outputs)} if bias else {}), folder / "model.safetensors")


def optional(path: Path, **values: Any) -> None:
    (path / "config_sentence_transformers.json").write_text(json.dumps(values))


def test_dense_layers_come_behind_the_pooling(layered: Path, encoder: Path) -> None:
    made = engine(layered)
    tokens = made.tokenize(TEXTS)
    first, second = (load_file(layered / f"{name}_Dense" / "model.safetensors") for name in (2, 3))
    mean = torch.stack([hidden(encoder, each).mean(0) for each in tokens])
    wanted = torch.tanh(mean @ first["linear.weight"].T @ second["linear.weight"].T + second["linear.bias"])
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(vectors(made.embed(tokens)), wanted, atol=1e-5)
    assert made.embedder.dimensions == 24
    assert made.embedder.prompts == ("query", "document", "Clustering")


def test_a_prompt_stands_before_each_text_and_the_models_default_where_none_is_named(layered: Path) -> None:
    made = engine(layered)

    def inputs(prompt: str, texts: list[str] = TEXTS) -> list[list[int]]:
        return inputs_of(made, Embedding(24, texts=tuple(texts), prompt=prompt, truncate=40), b"")

    plain = made.tokenize(TEXTS, 40)
    assert inputs("") == inputs("document") == plain
    assert inputs("query") == made.tokenize([PROMPTS["query"] + text for text in TEXTS], 40)
    optional(layered, prompts=PROMPTS, default_prompt_name="Clustering")
    before, made = made.revision, engine(layered)
    assert inputs("") == made.tokenize([PROMPTS["Clustering"] + text for text in TEXTS], 40)
    assert inputs("document") == plain  # named, and empty: not the default
    assert made.revision != before  # other prompts make other vectors
    with pytest.raises(RequestError, match="no prompt 'other'"):
        inputs("other")


def test_vectors_are_as_long_as_the_folder_says(layered: Path) -> None:
    optional(layered, truncate_dim=8)
    assert engine(layered).embedder.default_dimensions == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: optional(path, prompts=PROMPTS, default_prompt_name="none"), "default_prompt_name is 'none'"),
        (lambda path: optional(path, prompts=["query"]), "prompts must be texts by name"),
        (lambda path: optional(path, truncate_dim=0.5), "truncate_dim is 0.5"),
        (lambda path: (path / "3_Dense" / "model.safetensors").unlink(), "weights in .*3_Dense cannot be used"),
        (lambda path: set_layer(path, in_features=31), "takes vectors of 31 values, and gets 48"),
        (lambda path: set_layer(path, out_features=25), "weights in .*3_Dense cannot be used"),
        (lambda path: set_layer(path, activation_function="os.system"), "has the activation os.system"),
        (lambda path: set_layer(path, use_residual=True), "residual"),
        (lambda path: set_layer(path, in_features=None), "in_features"),
        (lambda path: leave_prompts_out(path), "include_prompt"),
    ],
)
def test_what_cannot_be_computed_as_sentence_transformers_does_is_named(
    layered: Path, change: Callable[[Path], Any], words: str
) -> None:
    change(layered)
    with pytest.raises((ModelError, EngineError), match=words):
        engine(layered)


def set_layer(path: Path, **values: Any) -> None:
    file = path / "3_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def leave_prompts_out(path: Path) -> None:
    (path / "1_Pooling" / "config.json").write_text(json.dumps({**pooled("mean"), "include_prompt": False}))


QUERY = "Who reads the log?"
LONG = "a worker takes the prompt " * 9
VARIED = SIZES | {"initializer_range": 0.5}  # so that scores differ
KINDS: dict[str, Any] = {
    "bert": BertConfig(**VARIED, max_position_embeddings=40, num_labels=1),
    "xlm-roberta": XLMRobertaConfig(**VARIED, max_position_embeddings=42, num_labels=1, type_vocab_size=1),
    "modernbert": ModernBertConfig(
        **VARIED, max_position_embeddings=40, num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=1,
    ),
    "qwen": Qwen3Config(
        **VARIED, num_key_value_heads=2, head_dim=8, max_position_embeddings=40, num_labels=1, pad_token_id=0
    ),
}  # fmt: skip


def cross_encoder(path: Path, kind: str = "bert", **changed: Any) -> Path:
    """A random model with one label, whose tokenizer joins two texts as the kind's own does."""
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(KINDS[kind]).save_pretrained(path)
    spec = json.loads(tiny_model.byte_level_json())
    special = {"sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1]}
    if kind in ("bert", "modernbert"):
        spec["post_processor"] = {"type": "BertProcessing", **special}
    elif kind == "xlm-roberta":
        spec["post_processor"] = {
            "type": "RobertaProcessing",
            **special,
            "trim_offsets": True,
            "add_prefix_space": False,
        }
    (path / "tokenizer.json").write_text(json.dumps(spec))
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changed))
    return path


def scored(path: Path, pairs: list[tuple[str, str]], longest: int = 40) -> Tensor:
    """The logits of plain transformers, of one pair at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (model.config.model_type == "bert")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), model_input_names=names)
    found = []
    for query, text in pairs:
        made = tokenizer([query], [text], truncation="longest_first", max_length=longest, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**made).logits[0])
    return torch.cat(found)


def scores_of(made: NativeEmbeddingEngine, inputs: list[Any]) -> Tensor:
    return torch.cat([torch.tensor(array("f", each)) for each in made.embed(inputs)])


def pairs(texts: tuple[str, ...], queries: tuple[str, ...] = (QUERY,), **options: Any) -> Embedding:
    return Embedding(1, texts, prompt=PAIRS, queries=queries, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_batch_equal_those_of_transformers_for_each_pair_alone(kind: str, tmp_path: Path) -> None:
    made = engine(cross_encoder(tmp_path, kind))
    assert (made.embedder.scores, made.embedder.dimensions, made.embedder.max_tokens) == (True, 1, 40)
    texts = (*TEXTS, LONG, "")
    wanted = torch.sigmoid(scored(tmp_path, [(QUERY, text) for text in texts]))
    assert wanted.max() - wanted.min() > 0.01, "otherwise anything would be equal"
    assert torch.allclose(scores_of(made, inputs_of(made, pairs(texts, truncate=40), b"")), wanted, atol=1e-5)
    swapped = (LONG, *TEXTS[1:], LONG)
    wanted = torch.sigmoid(scored(tmp_path, list(zip(swapped, texts, strict=False)), 24))
    found = inputs_of(made, pairs(texts[: len(swapped)], swapped, truncate=24), b"")
    assert torch.allclose(scores_of(made, found), wanted, atol=1e-5)


@examples(200)
@given(left=st.integers(0, 60), right=st.integers(0, 60), room=st.integers(0, 80))
def test_the_longer_text_of_a_pair_is_cut_as_by_tokenizers(left: int, right: int, room: int) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(room, strategy="longest_first")
    whole = tokenizer.encode("a " * left, "a " * right)
    kept = tuple(whole.sequence_ids.count(number) for number in (0, 1))
    assert embedding_protocol._longest_first(left, right, room) == kept


def test_a_pair_that_is_too_long_is_refused_or_its_text_is_cut_first(tmp_path: Path) -> None:
    made = engine(cross_encoder(tmp_path))
    with pytest.raises(RequestError, match=r"text 1 and its query have at least \d+ tokens; this model takes 40"):
        inputs_of(made, pairs(("a", LONG)), b"")
    (cut,) = inputs_of(made, pairs((LONG,), document_tokens=5), b"")
    query, text = made.tokenizer.encode(QUERY, add_special_tokens=False), made.tokenizer.encode(LONG)
    assert [token % SECOND for token in cut] == [1, *query.ids, 2, *text.ids[1:6], 2]
    assert [token // SECOND for token in cut] == [0] * (len(query) + 2) + [1] * 6


def test_of_a_pair_with_a_text_that_is_far_too_long_only_the_beginning_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(cross_encoder(tmp_path))
    read: list[int] = []
    monkeypatch.setattr(made, "tokenizer", Counting(made.tokenizer, read))
    (cut,) = inputs_of(made, pairs((LONG * 400,), truncate=40), b"")
    assert len(cut) == 40
    assert sum(read) < len(LONG * 400) / 10


def test_the_activation_is_the_one_that_sentence_transformers_finds(tmp_path: Path) -> None:
    path = cross_encoder(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    made = engine(path)
    logits = scored(path, [(QUERY, TEXTS[0])])
    assert torch.allclose(scores_of(made, inputs_of(made, pairs(TEXTS[:1]), b"")), logits, atol=1e-5)
    cross_encoder(path, sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh")
    made = engine(path)
    assert torch.allclose(scores_of(made, inputs_of(made, pairs(TEXTS[:1]), b"")), torch.tanh(logits), atol=1e-5)
    cross_encoder(path, sbert_ce_default_activation_function="os.system")
    with pytest.raises(ModelError, match=r"config.json has the activation os.system; torch's Identity"):
        engine(path)


def test_a_request_for_the_other_kind_of_model_is_refused(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="this model scores pairs of texts; vectors are made by other models"):
        inputs_of(engine(cross_encoder(tmp_path)), Embedding(1, ("a",)), b"")
    with pytest.raises(RequestError, match="this model makes vectors of texts; scores are made by other models"):
        inputs_of(engine(encoder), pairs(("a",)), b"")


def test_a_classifier_is_a_cross_encoder_if_it_has_one_label(tmp_path: Path) -> None:
    path = cross_encoder(tmp_path)
    assert embedding_model.scores_pairs(path)
    cross_encoder(path, id2label={"0": "no", "1": "yes"})
    assert not embedding_model.scores_pairs(path)
    cross_encoder(path, "qwen", pad_token_id=None)
    assert embedding_model.makes_vectors(path), "it is no language model, although its decoder could be one"
    with pytest.raises(EngineError, match="no pad_token_id"):
        engine(path)
