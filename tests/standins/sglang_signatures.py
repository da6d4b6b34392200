"""What ``sglang`` looks like where the adapter touches it, as data: stand-in and real one must agree.

``python -m tests.standins.sglang_signatures FOLDER`` reads it from the source of the real one, which need not be
importable, and prints ``sglang_signatures.json``. ``describe`` reads the stand-in's source in the same way.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).with_suffix(".json")
FUNCTIONS = {
    "srt/entrypoints/engine.py": {"Engine": ("async_generate", "get_all_child_pids", "shutdown")},
    "srt/managers/tokenizer_manager.py": {
        "TokenizerManager": ("generate_request", "abort_request", "update_weights_from_disk")
    },
    "srt/managers/tokenizer_control_mixin.py": {
        "TokenizerControlMixin": (
            *("get_loads", "flush_cache"),
            *("release_memory_occupation", "resume_memory_occupation"),
        )
    },
}
RECORDS = {
    "srt/sampling/sampling_params.py": ("SamplingParams",),
    "srt/disaggregation/kv_events.py": (
        "EventBatch",
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
        "KVEventBatch",
        "KVEventsConfig",
    ),
    "srt/managers/load_snapshot.py": ("LoadSnapshot",),
    "srt/managers/io_struct.py": (
        "UpdateWeightFromDiskReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    ),
}
ARGUMENTS = "srt/arg_groups/fields"  # the fields of ServerArgs, by namespace

Description = dict[str, dict[str, str]]


def describe(folder: Path) -> Description:
    """Of the package in ``folder``: parameters and fields, each with its default's source."""
    found: Description = {}
    for file, classes in FUNCTIONS.items():
        for name, methods in classes.items():
            body = _class(folder / file, name).body
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in methods:
                    found[f"{name}.{each.name}"] = dict(_parameters(each.args))
    for file, names in RECORDS.items():
        for name in names:
            found[name] = dict(_fields(_class(folder / file, name)))
    return found


def server_arguments(folder: Path) -> dict[str, str]:
    """The fields of the real one's ServerArgs."""
    found = {}
    for file in sorted((folder / ARGUMENTS).glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found |= dict(_fields(node))
    return dict(sorted(found.items()))


def recorded() -> Description:
    found: Description = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def differences(standin: Description, real: Description) -> list[str]:
    """One line per thing of the stand-in's that the real one has not, or has otherwise."""
    lines = []
    for subject, fields in standin.items():
        for name, value in fields.items():
            if name not in real.get(subject, {}):
                lines.append(f"{subject}: the real one has no {name}")
            elif real[subject][name] != value:
                lines.append(f"{subject}.{name}: {real[subject][name]}, not {value}")
    return lines


def _class(file: Path, name: str) -> ast.ClassDef:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{file} has no {name}")


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for each, default in [
        *zip(plain, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        if each.arg != "self":
            yield each.arg, "" if default is None else ast.unparse(default)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            yield each.target.id, "" if each.value is None else ast.unparse(each.value)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    json.dump(describe(source) | {"ServerArgs": server_arguments(source)}, sys.stdout, indent=1)
    sys.stdout.write("\n")
