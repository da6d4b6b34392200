"""Exports a checkpoint as a Hugging Face model directory: ``python -m tests.demo_model.export WORK OUT``."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.demo_model.checkpoint import state_of, weights_of
from tests.demo_model.template import END, STOP
from tests.demo_model.tokenizer import MAX_LEN

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def export(work: Path, out: Path) -> None:
    """Write config, generation config, weights in bfloat16 and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    shape = state_of(work)["shape"]
    for name in TOKENIZER:
        if (work / name).resolve() != (out / name).resolve():
            shutil.copyfile(work / name, out / name)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stop, end = (int(tokenizer.token_to_id(text) or 0) for text in (STOP, END))
    write_json(out / "config.json", config_of(shape, stop, end))
    write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": [stop, end], "pad_token_id": end})
    weights = {name: each for name, each in weights_of(work).items() if name.startswith("model.")}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors makes its files readable for the owner only


def config_of(shape: dict[str, Any], stop: int, end: int) -> dict[str, Any]:
    """config.json of the language model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": stop,
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "hidden_size": shape["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": shape["inner"],
        "max_position_embeddings": MAX_LEN,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape["heads"],
        "num_hidden_layers": shape["layers"],
        "num_key_value_heads": shape["kv_heads"],
        "pad_token_id": end,
        "rms_norm_eps": shape["eps"],
        "rope_parameters": {"rope_theta": shape["theta"], "rope_type": "default"},
        "rope_theta": shape["theta"],  # where programs older than transformers 5 look
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape["vocab"],
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    export(arguments.work, arguments.out)
