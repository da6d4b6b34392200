"""Folders that an engine cannot load: each is named at once, with the file and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.infra.model.servable import problem, quantization
from penstock.operate.check_model import check
from penstock.workers.runners.token_backend import model_path

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 123456789\n"
Change = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose configuration and weights a test may change."""
    for file in modeldir.TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes((modeldir.TINY / name).read_bytes())
    return tmp_path


def configured(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | values))

    return change


def quantized(**values: Any) -> Change:
    return configured(quantization_config=values)


def weights(content: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(content(file.read_bytes()))

    return change


READERS = "--engine vllm or sglang"
# name: (change, words of the line, whether it concerns the native engine alone)
FORMS: dict[str, tuple[Change, tuple[str, ...], bool]] = {
    "GPTQ": (quantized(quant_method="gptq", bits=4), ("gptq (4 bits)", READERS), True),
    "AWQ": (quantized(quant_method="awq", bits=4, version="gemm"), ("awq (4 bits)", READERS), True),
    "compressed-tensors": (
        quantized(quant_method="compressed-tensors", format="pack-quantized"), ("(pack-quantized)", READERS), True,
    ),
    "bitsandbytes": (quantized(quant_method="bitsandbytes", load_in_4bit=True), ("(4 bits)", READERS), True),
    "torchao": (quantized(quant_method="torchao", quant_type={}), ("torchao", READERS), True),
    "NVFP4": (quantized(quant_method="modelopt", quant_algo="NVFP4"), ("NVFP4", "--engine trtllm"), True),
    "NVFP4 in a file of its own": (
        lambda folder: (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}'),
        ("modelopt (NVFP4) (hf_quant_config.json)", "--engine trtllm"), True,
    ),
    "MXFP4 of another model": (quantized(quant_method="mxfp4"), ("mxfp4", "vllm or sglang"), True),
    "a method that nobody knows": (quantized(quant_method="secret"), ("secret", "unquantized"), True),
    "no method": (quantized(bits=4), ("an unnamed method (4 bits)",), True),
    "a file that is cut off": (weights(lambda whole: whole[:9999]), ("model.safetensors is cut off",), False),
    "a header that is cut off": (weights(lambda whole: whole[:100]), ("is cut off or no safetensors",), False),
    "an empty file": (weights(lambda whole: b""), ("(0 bytes)",), False),
    "a header that is no JSON": (weights(lambda whole: whole[:8] + b"x" + whole[9:]), ("cannot be read",), False),
    "a pointer of Git LFS": (weights(lambda whole: POINTER), ("Git LFS pointer", "git lfs pull"), False),
    "a link to nothing": (
        lambda folder: (folder / "b.safetensors").symlink_to("../../blobs/77"), ("link to ../../blobs/77",), False,
    ),
    "a link to nothing, of a file that is optional": (
        lambda folder: (folder / "chat_template.jinja").symlink_to("../../blobs/78"), ("snapshots/",), False,
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("has no weights",), False),
    "GGUF": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"), ("GGUF weights only",), True,
    ),
    "a dtype with its module": (configured(torch_dtype="torch.bfloat16"), ('"torch.bfloat16"', "bfloat16"), True),
    "an unknown dtype": (configured(dtype="bfloat17"), ('"bfloat17"',), True),
    "unknown RoPE scaling": (configured(rope_scaling={"rope_type": "magic", "factor": 2.0}), ("'magic'", "yarn"), True),
    "unknown RoPE scaling of some layers": (
        configured(rope_parameters={"full_attention": {"rope_type": "magic"}}), ("'magic'",), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_folder_that_cannot_be_served_says_so_before_an_engine_is_built(name: str, folder: Path) -> None:
    change, words, native_only = FORMS[name]
    change(folder)
    with pytest.raises(modeldir.ModelError) as refused:
        model_path(WorkerSettings(engine="native", model=str(folder)))
    line = str(refused.value)
    assert "\n" not in line
    assert str(folder) in line
    assert [word for word in words if word not in line] == []
    assert bool(problem(folder, "vllm")) is not native_only


def test_whole_folders_are_served(folder: Path) -> None:
    for bundled in (folder, modeldir.DEMO, modeldir.TINY, modeldir.MODELS / "demo-vision"):
        assert problem(bundled, "native") == ""
    assert quantization(folder) is None
    configured(quantization_config={"quant_method": "mxfp4"}, model_type="gpt_oss")(folder)
    assert problem(folder, "native") == ""
    configured(quantization_config={"quant_method": "fp8"})(folder)
    assert problem(folder, "native") == ""


def test_the_mock_engine_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert model_path(WorkerSettings(engine="mock", model=str(folder))) == folder


def test_no_process_takes_a_link_to_nothing_for_a_file_that_is_not_there(folder: Path) -> None:
    """Else a gateway would have another template than its workers."""
    (folder / "chat_template.jinja").symlink_to("../../blobs/78")
    with pytest.raises(modeldir.ModelError, match=r"chat_template.jinja is a link to ../../blobs/78, which is missing"):
        modeldir.load(folder)
    assert [line.text for line in check(folder).lines if "blobs/78" in line.text], "also said by `models check`"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_pointer_in_place_of_a_small_file_is_named(name: str, folder: Path) -> None:
    (folder / name).write_bytes(POINTER)
    with pytest.raises(modeldir.ModelError, match=rf"{name} cannot be read: it is a Git LFS pointer"):
        modeldir.load(folder)
