"""Feature support of each engine, for the workers' checks and the printed matrix. Imports no engine."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import fields

NO = ""


class Support(Struct, frozen=True, kw_only=True):
    """Support of one engine. Each field is "" (no), "yes", or says how or within which limits."""

    prefill_decode: str
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
    cpu: str


# Field -> its title in the matrix.
FEATURES: Mapping[str, str] = {
    "prefill_decode": "separate prefill and decode; KV moves by",
    "encode": "images, encode workers",
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
    "cpu": "runs without a GPU",
}
assert tuple(FEATURES) == tuple(field.name for field in fields(Support))

SUPPORT: Mapping[str, Support] = {
    "native": Support(
        prefill_decode="blocks over NIXL",
        encode="LLaVA-form models",
        kv_events="yes",
        resumed_draws="yes",
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors="yes",
        speculation="draft model, n-gram; not with CUDA kernels",
        several_gpus=NO,
        several_nodes=NO,
        rank_routing=NO,
        diffusion="diffusers",
        embed="encoders and decoders",
        cpu="yes",
    ),
    "mock": Support(
        prefill_decode="blocks over NIXL",
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
        cpu="yes",
    ),
    "trtllm": Support(
        prefill_decode="its cache transceiver (NIXL, UCX)",
        encode="its MultimodalEncoder",
        kv_events="yes",
        resumed_draws=NO,
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors="aggregated, without speculation",
        speculation="Eagle 3, MTP, NGram, draft model",
        several_gpus="TP, PP, EP, attention DP",
        several_nodes="MPI or Slurm with its launcher",
        rank_routing="yes",
        diffusion="visual_gen of 1.3",
        embed=NO,
        cpu=NO,
    ),
    "vllm": Support(
        prefill_decode="its NixlConnector",
        encode=NO,
        kv_events="over ZMQ",
        resumed_draws=NO,
        logprobs="yes",
        prompt_logprobs="yes",
        logits_processors=NO,
        speculation="as its speculative_config (Eagle 3, NGram, …)",
        several_gpus="TP, PP, DP",
        several_nodes=NO,
        rank_routing="data-parallel ranks",
        diffusion=NO,
        embed=NO,
        cpu="its CPU build",
    ),
    "sglang": Support(
        prefill_decode="its disaggregation over NIXL",
        encode=NO,
        kv_events="over ZMQ",
        resumed_draws="with enable_deterministic_inference",
        logprobs="yes",
        prompt_logprobs="yes, without ranks beyond the best",
        logits_processors=NO,
        speculation="as its speculative_algorithm (EAGLE 3, NGRAM, …)",
        several_gpus="TP, PP, DP",
        several_nodes=NO,
        rank_routing="data-parallel and attention-DP ranks",
        diffusion=NO,
        embed=NO,
        cpu=NO,
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
