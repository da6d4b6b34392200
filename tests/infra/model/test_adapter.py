"""Files of LoRA adapters that are damaged, or are not what PEFT writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model.adapter import CONFIG, WEIGHTS, AdapterError, read_adapter

NAMES = [f"base_model.model.layer.lora_{each}.weight" for each in "AB"]
DEEP = "[" * 100_000


def described(down: Any, up: Any) -> str:
    """The header of a file of weights with two matrices of these shapes."""
    offsets = ([0, 32], [32, 64])
    return json.dumps(
        {
            name: {"dtype": "F32", "shape": shape, "data_offsets": where}
            for name, shape, where in zip(NAMES, (down, up), offsets, strict=True)
        }
    )


def written(folder: Path, header: str, **config: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    return folder


def test_a_header_says_which_layers_an_adapter_changes(tmp_path: Path) -> None:
    read = read_adapter(written(tmp_path, described([2, 4], [4, 2])), 8)
    assert (read.rank, read.scale, list(read.modules)) == (2, 2.0, ["layer"])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (described(5, [4, 2]), "cannot be read: Expected `array`"),
        (described(None, [4, 2]), "cannot be read: Expected `array`"),
        (described([2, "4"], [4, 2]), "cannot be read: Expected `int`"),
        (f'{{"{NAMES[0]}": {{"shape": {DEEP}', "cannot be read"),
        (described([2, 4], [4, 2])[:-9], "cannot be read"),
        (described([3, 4], [4, 2]), "do not fit r = 2"),
    ],
)
def test_a_damaged_header_is_refused_with_the_file_s_name(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(AdapterError, match=rf"{WEIGHTS}.*{message}"):
        read_adapter(written(tmp_path, header), 8)


@pytest.mark.parametrize(
    "alpha", [10**400, -(10**400), 1e300, "8", None, True], ids=["long", "below", "float", "text", "null", "true"]
)
def test_an_alpha_that_no_training_gives_is_refused(tmp_path: Path, alpha: object) -> None:
    with pytest.raises(AdapterError, match="lora_alpha at most 1e"):
        read_adapter(written(tmp_path, described([2, 4], [4, 2]), lora_alpha=alpha), 8)
