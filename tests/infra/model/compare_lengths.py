"""Compare lengths of models with those that vLLM's own functions find, without installing it.

    python -m tests.infra.model.compare_lengths DIR

DIR is vLLM's unpacked source distribution (0.33; other releases name the functions otherwise). Exit status 1: a length
that we take unless more is asked for is longer than vLLM's, which would refuse it at its start.
"""

import __future__

import ast
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

from penstock.infra.model.defaults import context_length
from tests.infra.model.test_lengths import FORMS


def functions(file: Path, *names: str) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node


def vllms(folder: Path) -> Any:
    """vLLM's function from a configuration to its length."""
    package = folder / "vllm"
    first = next(
        functions(package / "transformers_utils/model_arch_config_convertor.py", "derive_max_model_len_and_key")
    )
    parts = [
        first,
        *functions(package / "transformers_utils/config.py", "iter_rope_parameters", "is_rope_parameters_nested"),
        *functions(package / "config/model.py", "_get_and_verify_max_len"),
    ]
    scope: dict[str, Any] = {
        "logger": logging.getLogger("vllm"),
        "ALLOWED_LAYER_TYPES": ("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
        "current_platform": SimpleNamespace(check_max_model_len=lambda found: found),
        "envs": SimpleNamespace(VLLM_ALLOW_LONG_MAX_MODEL_LEN=False),
    }
    module = ast.Module([*parts], [])
    exec(compile(module, str(package), "exec", __future__.annotations.compiler_flag), scope)

    def found(config: Any, wanted: int | None) -> int:
        named = scope["derive_max_model_len_and_key"](SimpleNamespace(hf_text_config=config))
        arch = SimpleNamespace(derived_max_model_len_and_key=named)
        return int(scope["_get_and_verify_max_len"](config, arch, None, wanted, False, None))

    return found


def configuration(config: dict[str, Any]) -> PretrainedConfig:
    """As vLLM has it once transformers has read it: RoPE under its current name."""
    text = {**config, **config.get("text_config", {})}
    rope = text.pop("rope_scaling", None) or text.pop("rope_parameters", None)
    made = SimpleNamespace(model_type=text.pop("model_type", "llama"), rope_parameters=rope)
    vars(made).update(text)
    if rope and not any(isinstance(part, dict) for part in rope.values()):
        made.rope_parameters = {"rope_type": rope.get("type", "default"), **rope}
    return made  # type: ignore[return-value]


def main(arguments: Sequence[str]) -> int:
    theirs, longer = vllms(Path(arguments[0])), 0
    print(f"{'form':35}{'ours':>10}{'at most':>10}{'vLLM':>10}  vLLM takes ours")
    for name, (config, _, _) in FORMS.items():
        if name in ("malformed", "without a length"):  # transformers' classes know the latter, and refuse the former
            continue
        ours, read = context_length(config), configuration(config)
        if "max_position_embeddings" not in vars(read) and name.startswith("Gemma"):
            read.max_position_embeddings = ours.tokens  # of transformers' class
        try:
            taken = theirs(read, ours.tokens) == ours.tokens
        except ValueError:
            taken = False
        longer += not taken
        print(f"{name:35}{ours.tokens:>10}{ours.most:>10}{theirs(read, None):>10}  {'yes' if taken else 'NO'}")
    return int(longer > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
