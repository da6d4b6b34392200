"""``penstock recipe generate``: engine arguments for a model's shape, GPUs, a role and a load, as the rules require.

``generate`` is pure: it makes a tree for ``decode``, and checks it by the rules. Where the rules leave a choice, the
values are those of the recipes, for the reasons given there.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from msgspec import Struct
from msgspec.structs import replace

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser, whole_number
from penstock.infra.engine_args.memory_estimate import GIB, NVFP4_BITS, GpuMemory, Shape, UnknownShape, estimate
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.rules.parallelism import moe_backend
from penstock.infra.engine_args.rules.rule import Context, EngineRole, up
from penstock.infra.engine_args.rules.steps import DECODE_BATCH, PREFILL_BATCH
from penstock.infra.engine_args.schema import EngineArgs, TransceiverBackend
from penstock.infra.engine_args.tree import BadArguments, Tree, decode
from penstock.launch.recipes.advice import check_set, failed
from penstock.launch.recipes.catalogue import GPUS, context_of, parse, shape_at

BLOCK = 32
STEP_TOKENS = 8192  # prompt tokens that saturate a GPU in one step
LONG_STEP_TOKENS = 16384  # longer prompts are chunked
MAX_BATCH = 2048
ATTENTION_DP_LOAD = 32  # sequences per GPU from which storing KV only once is worth copies of the attention weights
SPARE_SLOTS = 8  # one redundant expert per this many experts
TRANSFER_TIMEOUT_MS = 60_000
FRACTIONS: dict[str, float] = {"aggregated": 0.85, "prefill": 0.8, "decode": 0.85}
ATTENTION_DP_FRACTION = 0.7  # the load of the ranks is uneven
MAX_MTP = 5


class EngineSpec(Struct, frozen=True, kw_only=True):
    """The purpose of an engine.

    Attributes:
        gpus: of this engine; ``gpus_per_node`` of them share a node.
        isl, osl: tokens of the longest prompt and answer; of usual ones with ``longest``.
        longest: tokens of the longest request, prompt and answer; 0: ``isl + osl``.
        concurrency: concurrent requests, over all its GPUs.
        mtp: tokens per step drafted by the model's own MTP layer; 0: none.
        windows: keep only the tokens in the model's sliding windows.
        stages: of a pipeline; the other GPUs of each are tensor ranks.
        attention_dp: None: as the model and the load suggest.
    """

    role: EngineRole
    gpus: int
    gpu_bytes: int
    blackwell: bool
    isl: int
    osl: int
    concurrency: int
    gpus_per_node: int = 8
    mtp: int = 0
    windows: bool = False
    transport: str = "NIXL"
    stages: int = 1
    attention_dp: bool | None = None
    longest: int = 0

    @property
    def length(self) -> int:
        return max(self.longest, self.isl + self.osl)

    @property
    def tensor(self) -> int:
        return self.gpus // self.stages

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)


class Generated(Struct, frozen=True, kw_only=True):
    tree: Tree
    args: EngineArgs
    memory: GpuMemory
    warnings: tuple[str, ...]


def generate(shape: Shape, spec: EngineSpec) -> Generated:
    """
    Raises:
        BadArguments: the model cannot be served this way; each problem says what to change.
    """
    problems = list(_impossible(shape, spec))
    if problems:
        raise BadArguments(problems)
    tree = tree_of(shape, spec)
    args = decode(tree)
    context = engine_context(shape, spec)
    findings = check(args, context)
    if errors := [
        f"{each.where}: {each.message}; {each.fix} ({each.rule})" for each in findings if each.level == "error"
    ]:
        more = _enough(shape, spec)
        raise BadArguments([*errors, *([f"gpus: {more} are enough"] if more else [])])
    memory = estimate(args, shape, spec.gpu_bytes, length=args.max_seq_len or 0)
    warnings = tuple(str(each) for each in findings)
    sequences = math.ceil(spec.concurrency / (spec.gpus if args.enable_attention_dp else 1))
    if spec.role != "prefill" and memory.sequences < sequences:
        warnings += (
            f"memory: {memory.sequences} whole contexts of {memory.length} tokens fit the {memory.pool / GIB:.0f} GiB "
            f"of KV on a rank, but {sequences} are to run there; add GPUs or workers, or requests may wait",
        )
    return Generated(tree=tree, args=args, memory=memory, warnings=warnings)


def engine_context(shape: Shape, spec: EngineSpec) -> Context:
    return Context(
        role=spec.role,
        model_len=spec.length,
        longest_prompt=spec.longest or spec.isl,
        gpus=spec.gpus,
        nodes=spec.nodes,
        gpu_bytes=spec.gpu_bytes,
        blackwell=spec.blackwell,
        shape=shape,
    )


def tree_of(shape: Shape, spec: EngineSpec) -> Tree:
    """The arguments, in the order of the recipes."""
    attention_dp = _attention_dp(shape, spec)
    length = up(spec.length, BLOCK)
    batch = _batch(spec, attention_dp)
    tokens = _step_tokens(spec, length, batch)
    tree: dict[str, Any] = {"tensor_parallel_size": spec.tensor}
    if spec.stages > 1:
        tree["pipeline_parallel_size"] = spec.stages
    if shape.experts is not None and spec.tensor > 1:
        tree["moe_expert_parallel_size"] = spec.tensor
    if spec.nodes > 1:
        tree["gpus_per_node"] = spec.gpus_per_node
    if spec.tensor > 1:
        tree["enable_attention_dp"] = attention_dp
    if spec.role == "prefill":
        tree["disable_overlap_scheduler"] = True
    if shape.experts is not None:
        tree["moe_config"] = _moe(shape, spec, attention_dp, batch, tokens)
    tree |= {"max_batch_size": batch, "max_num_tokens": tokens, "max_seq_len": length}
    if tokens < length:
        tree["enable_chunked_prefill"] = True
    if spec.mtp:
        tree["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": spec.mtp}
    tree["kv_cache_config"] = _kv_cache(shape, spec, attention_dp, length)
    tree["scheduler_config"] = {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}
    tree["cuda_graph_config"] = (
        None if spec.role == "prefill" else {"enable_padding": True, "batch_sizes": sizes(batch)}
    )
    if spec.role in ("prefill", "decode"):
        tree["cache_transceiver_config"] = {
            "backend": spec.transport,
            "max_tokens_in_buffer": length,
            "kv_transfer_timeout_ms": TRANSFER_TIMEOUT_MS,
        }
    return tree


def sizes(batch: int) -> list[int]:
    """Batch sizes with a CUDA graph: powers of two and the largest batch; other sizes are padded."""
    return [*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch]


def _impossible(shape: Shape, spec: EngineSpec) -> list[str]:
    problems = []
    if spec.role not in FRACTIONS:
        problems.append(f"role: an engine of role {spec.role} has no KV cache; see the recipe llava16-encode")
    if shape.max_len and spec.length > shape.max_len:
        problems.append(f"isl + osl: {spec.length} tokens, the model supports {shape.max_len} positions")
    if spec.mtp and not shape.mtp_layers:
        problems.append("mtp: the model has no MTP layer; leave it out, or add a draft model by hand")
    if spec.mtp > MAX_MTP:
        problems.append(f"mtp: {spec.mtp} tokens; use at most {MAX_MTP}")
    if spec.windows and not any(shape.windows):
        problems.append("windows: the model has no sliding windows; leave it out")
    if spec.gpus % spec.stages:
        problems.append(f"stages: {spec.gpus} GPUs do not divide by {spec.stages}")
    if spec.nodes > 1 and spec.gpus % spec.gpus_per_node:
        problems.append(f"gpus: {spec.gpus} do not fill nodes of {spec.gpus_per_node}; use a multiple")
    return problems


def _attention_dp(shape: Shape, spec: EngineSpec) -> bool:
    """Whether each GPU attends to its own sequences: if heads do not divide, or KV would be stored on several GPUs.

    Every rank stores an MLA latent, and copies of KV heads if there are more ranks than heads.
    """
    if spec.tensor == 1:
        return False
    if spec.attention_dp is not None:
        return spec.attention_dp
    if shape.experts is None:
        return False
    if shape.heads % spec.gpus:
        return True
    copied = bool(shape.latent) or shape.kv_heads < spec.gpus
    busy = spec.role == "prefill" or spec.concurrency >= ATTENTION_DP_LOAD * spec.gpus
    return copied and busy


def _batch(spec: EngineSpec, attention_dp: bool) -> int:
    """Sequences per step and rank."""
    if spec.role == "prefill":
        return max(4, min(PREFILL_BATCH, STEP_TOKENS // spec.isl))
    per_rank = math.ceil(spec.concurrency / (spec.gpus if attention_dp else 1))
    least = DECODE_BATCH if spec.role == "decode" else 8
    return min(MAX_BATCH, max(least, up(per_rank, 8)))


def _step_tokens(spec: EngineSpec, length: int, batch: int) -> int:
    decoding = up(batch * (1 + spec.mtp), BLOCK)
    if spec.role == "decode":
        return decoding
    return max(STEP_TOKENS, decoding, min(length, LONG_STEP_TOKENS))


def _moe(shape: Shape, spec: EngineSpec, attention_dp: bool, batch: int, tokens: int) -> Tree:
    backend = moe_backend(
        ranks=spec.tensor, attention_dp=attention_dp, blackwell=spec.blackwell, bits=shape.expert_bits
    )
    moe: Tree = {"backend": backend}
    if backend == "WIDEEP" and shape.experts is not None:
        slots = up(shape.experts.count + shape.experts.count // SPARE_SLOTS, spec.gpus)
        moe["load_balancer"] = {"num_slots": slots, "layer_updates_per_iter": 1}
        if spec.role == "decode":
            moe["max_num_tokens"] = up(batch * (1 + spec.mtp), BLOCK) * spec.gpus
        else:
            moe["max_num_tokens"] = tokens
    return moe


def _kv_cache(shape: Shape, spec: EngineSpec, attention_dp: bool, length: int) -> Tree:
    kv: Tree = {"free_gpu_memory_fraction": ATTENTION_DP_FRACTION if attention_dp else FRACTIONS[spec.role]}
    if shape.expert_bits == NVFP4_BITS:
        kv["dtype"] = "fp8"  # such checkpoints include its scales
    if spec.windows:
        kv["max_attention_window"] = _pattern([window or length for window in shape.windows])
    kv["tokens_per_block"] = BLOCK
    return kv


def _pattern(windows: list[int]) -> list[int]:
    """The shortest list that gives these when repeated."""
    for period in range(1, len(windows)):
        if all(window == windows[layer % period] for layer, window in enumerate(windows)):
            return windows[:period]
    return windows


def _enough(shape: Shape, spec: EngineSpec) -> int:
    """The next power of two of GPUs that is enough; 0: none up to 128."""
    gpus = spec.gpus
    while gpus < 128:
        gpus *= 2
        tried = replace(spec, gpus=gpus)
        if _impossible(shape, tried):
            continue
        findings = check(decode(tree_of(shape, tried)), engine_context(shape, tried))
        if not any(each.level == "error" for each in findings):
            return gpus
    return 0


OK, REFUSED, USAGE = 0, 1, 2
PER_NODE = {"GB200": 4}  # a tray; other nodes have eight
_NAME = re.compile(r"\w[\w.-]{0,100}", re.ASCII)


def run_generate(argv: Sequence[str]) -> int:
    """Print the recipes, or write them to a folder."""
    args = _parser().parse_args(argv)
    try:
        texts = files(shape_at(args.model), args.model, vars(args))
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            for name, (text, _) in texts.items():
                (Path(args.out) / f"{name}.yaml").write_text(text, encoding="utf-8")
    except (BadArguments, UnknownShape, OSError) as error:
        problems = error.problems if isinstance(error, BadArguments) else (str(error),)
        return fail("recipe generate", *problems, status=REFUSED)
    for name, (text, generated) in texts.items():
        for warning in generated.warnings:
            print(f"{name}: {warning}", file=sys.stderr)
        print(Path(args.out) / f"{name}.yaml" if args.out else f"# ---- {name}.yaml\n{text}")
    return OK


def files(shape: Shape, model: str, arguments: dict[str, Any]) -> dict[str, tuple[str, Generated]]:
    """The texts of recipes by name: one, or a pair for prefill and decode.

    Raises:
        BadArguments: the model cannot be served this way, or the two engines would not match.
    """
    gpus_by_role: dict[EngineRole, int] = {
        "aggregated": arguments["gpus"], "prefill": arguments["prefill_gpus"], "decode": arguments["decode_gpus"],
    }  # fmt: skip
    counts = {role: count for role, count in gpus_by_role.items() if count}
    if set(counts) not in ({"aggregated"}, {"prefill", "decode"}):
        raise BadArguments(["gpus: give --gpus, or --prefill-gpus with --decode-gpus"])
    name = arguments["set"] or _slug(model)
    if not _NAME.fullmatch(name):
        raise BadArguments([f"set: {name!r} is used in file names; use letters, digits, _ . and -"])
    memory, blackwell = GPUS[arguments["gpu"]]
    specs = {
        role: EngineSpec(
            role=role,
            gpus=gpus,
            gpu_bytes=int(memory * GIB),
            blackwell=blackwell,
            gpus_per_node=arguments["gpus_per_node"] or PER_NODE.get(arguments["gpu"], 8),
            **{key: arguments[key] for key in ("isl", "osl", "concurrency", "mtp", "windows", "transport")},
        )
        for role, gpus in counts.items()
    }
    return texts_of(shape, specs, model=model, name=name, gpu=arguments["gpu"])


def texts_of(
    shape: Shape, specs: Mapping[EngineRole, EngineSpec], *, model: str, name: str, gpu: str
) -> dict[str, tuple[str, Generated]]:
    """The texts of the recipes of one set by name, checked alone and together.

    Raises:
        BadArguments: the model cannot be served this way, or the engines would not match.
    """
    generated = {}
    for role, spec in specs.items():
        try:
            one = generate(shape, spec)
        except BadArguments as error:
            raise BadArguments(f"{role}: {problem}" for problem in error.problems) from error
        suffix = "agg" if role == "aggregated" else role
        generated[f"{name}-{suffix}"] = (text_of(one, spec, model=model, name=name, gpu=gpu), one)
    recipes = [parse(name, text) for name, (text, _) in generated.items()]
    findings = check_set([(recipe, context_of(recipe)) for recipe in recipes])
    if failed(findings):
        raise BadArguments(str(each) for each in findings if each.level == "error")
    return generated


def text_of(generated: Generated, spec: EngineSpec, *, model: str, name: str, gpu: str) -> str:
    """A recipe: header and arguments."""
    drafted = f", {spec.mtp} drafted by MTP" if spec.mtp else ""
    header: dict[str, Any] = {
        "title": f"{model}, {spec.role}, generated",
        "model": model,
        "engine": "trtllm",
        "backend": "pytorch",
        "role": spec.role,
        "set": name,
        "gpus": spec.gpus,
        "nodes": spec.nodes,
        "gpu": gpu,
        "longest_prompt": spec.isl,
        "use": f"Prompts of {spec.isl} and answers of {spec.osl} tokens, {spec.concurrency} at once{drafted}; "
        f"{generated.memory.sequences} whole contexts fit each rank (an estimate).",
        "rows": [],
    }
    if spec.nodes == 1:
        del header["nodes"]
    head = "".join(f"# {key}: {_line(value)}\n" for key, value in header.items())
    sections = [
        yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)
        for key, value in generated.tree.items()
    ]
    return f"{head}\n{''.join(sections)}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def _line(value: Any) -> str:
    text: str = yaml.dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text


def _slug(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")


def _parser() -> Parser:
    parser = Parser(
        prog="penstock recipe generate", description="TensorRT-LLM engine arguments for a model, GPUs and a load"
    )
    parser.add_argument("--model", required=True, help="directory with a config.json, or the model of a recipe")
    parser.add_argument("--gpu", required=True, choices=tuple(GPUS), help="kind of GPU")
    for flag, help_text in (
        ("--gpus", "GPUs of an aggregated engine"),
        ("--prefill-gpus", "GPUs of a prefill engine"),
        ("--decode-gpus", "GPUs of a decode engine"),
        ("--gpus-per-node", "default: 8, GB200: 4"),
    ):
        parser.add_argument(flag, type=whole_number(), default=0, metavar="N", help=help_text)
    parser.add_argument("--isl", type=whole_number(), required=True, metavar="N", help="tokens of the longest prompt")
    parser.add_argument("--osl", type=whole_number(), required=True, metavar="N", help="tokens of the longest answer")
    parser.add_argument(
        "--concurrency", type=whole_number(), required=True, metavar="N", help="concurrent requests, per engine"
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="tokens drafted by the model's own MTP layer")
    parser.add_argument("--windows", action="store_true", help="keep only the tokens in the model's sliding windows")
    parser.add_argument("--transport", choices=get_args(TransceiverBackend), default="NIXL", help="KV transport")
    parser.add_argument("--set", default="", help="prefix of the file names; default: the model's name")
    parser.add_argument("--out", default="", metavar="DIR", help="write the files here instead of printing them")
    return parser
