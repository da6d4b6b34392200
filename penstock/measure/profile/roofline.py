"""How long prompts and decode steps take by the rates of a GPU. Pure arithmetic, no measurement.

Products of a step with ``rows`` tokens: the time to read the weights and the time to compute with them, joined by a
norm, because neither hides the other wholly. Attention: of prompts 2 x heads x (query and value width) x tokens² / 2
operations a layer; of a decode step the bytes of the KV read. Tensor ranks add two all-reduces a layer (ring: 2 (n-1)/n
of the activations), expert ranks two all-to-all a layer. Pipeline stages split the rows into as many groups: a group's
time is that of all stages, so stages save memory and not time.

Rates are dense (without sparsity), links are per direction. Data sheets: A100 80 GB SXM, H100 SXM, H200 SXM, HGX B200,
GB200 NVL72 (a 72nd of it), L40S, all by NVIDIA. The L40S has no NVLink: its link is PCIe 4.0 x16.

The parallel mappings of a model that are worth trying: which divide its heads and experts, up to some GPUs.
"""

from collections.abc import Iterator

from msgspec import Struct

from penstock.infra.engine_args import memory_estimate
from penstock.infra.engine_args.memory_estimate import GIB, GpuMemory, Shape, UnknownShape
from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.engine_args.tree import decode
from penstock.measure.profile.data import SHORTEST, Profile, Setup, modelled, spaced


class GpuFigures(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        bf16_tflops, fp8_tflops, fp4_tflops: 10^12 operations per second; 0: the type is computed as bf16.
        hbm_gb_s: memory bandwidth, 10^9 bytes per second.
        memory_gib: as the driver reports it.
        link_gb_s: between two GPUs of a node.
    """

    bf16_tflops: float
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    hbm_gb_s: float
    memory_gib: float
    link_gb_s: float

    def tflops(self, bits: float) -> float:
        """Of products of weights with this many bits."""
        if bits < 8:
            return self.fp4_tflops or self.fp8_tflops or self.bf16_tflops
        return self.fp8_tflops or self.bf16_tflops if bits < 16 else self.bf16_tflops


GPUS = {
    "A100": GpuFigures(bf16_tflops=312, hbm_gb_s=2039, memory_gib=79.3, link_gb_s=300),
    "H100": GpuFigures(bf16_tflops=989, fp8_tflops=1979, hbm_gb_s=3350, memory_gib=79.6, link_gb_s=450),
    "H200": GpuFigures(bf16_tflops=989, fp8_tflops=1979, hbm_gb_s=4800, memory_gib=140.4, link_gb_s=450),
    "B200": GpuFigures(
        bf16_tflops=2250, fp8_tflops=4500, fp4_tflops=9000, hbm_gb_s=8000, memory_gib=179.0, link_gb_s=900
    ),
    "GB200": GpuFigures(
        bf16_tflops=2500, fp8_tflops=5000, fp4_tflops=10000, hbm_gb_s=8000, memory_gib=185.0, link_gb_s=900
    ),
    "L40S": GpuFigures(bf16_tflops=362, fp8_tflops=733, hbm_gb_s=864, memory_gib=44.5, link_gb_s=32),
}


class Efficiency(Struct, frozen=True, kw_only=True):
    """Shares of the peak rates that an engine reaches, and times that no rate explains.

    The defaults are of the native engine on one H200 with an 8B Llama shape in bf16; docs/results/gpus.md has how
    it was measured, and how well they fit. Products of prompts 640 of 989 TFLOP/s, attention of prompts 550, weights
    and KV 4.0 of 4.8 TB/s, KV of a prompt between two GPUs 250 of 450 GB/s. All-reduce was not measured: 70 % of the
    link and 10 µs are assumptions.

    Attributes:
        blend: norm that joins the time of reading weights and the time of computing with them. 1: one after the
            other, infinite: at once.
        step_ms: of each decode step; ``prompt_ms``: of each prompt.
        reduce_ms: of one all-reduce of nothing.
    """

    products: float = 0.647
    attention: float = 0.556
    memory: float = 0.833
    handoff: float = 0.55
    link: float = 0.7
    blend: float = 1.5
    step_ms: float = 0.3
    prompt_ms: float = 3.0
    reduce_ms: float = 0.01


ACTIVATION_BYTES = 2
_MLA_WIDTH = 320  # query and value width of a head with multi-head latent attention: 128 + 64, and 128
_OPERATIONS = 2  # a multiplication and an addition
MAX_BATCH = 512


class Mapping(Struct, frozen=True, kw_only=True):
    """How one engine is spread over GPUs.

    Attributes:
        tp: tensor ranks; with ``attention_dp`` each attends to sequences of its own.
        pp: pipeline stages.
        ep: ranks over which the experts are spread; 1: each expert is split over the tensor ranks.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def ranks(self) -> int:
        """That attend to sequences of their own."""
        return self.tp if self.attention_dp else 1

    @property
    def name(self) -> str:
        kind = "dep" if self.attention_dp else "tep" if self.ep > 1 else "tp"
        return f"{kind}{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "")


class RooflineEngine(Struct, frozen=True):
    """A model on GPUs."""

    shape: Shape
    gpu: GpuFigures
    mapping: Mapping
    efficiency: Efficiency = Efficiency()

    def arguments(self, length: int) -> EngineArgs:
        """As an engine would be started for contexts of ``length`` tokens."""
        mapping = self.mapping
        tree = {
            "tensor_parallel_size": mapping.tp,
            "pipeline_parallel_size": mapping.pp,
            "max_batch_size": MAX_BATCH,
            "max_seq_len": length,
            "enable_attention_dp": mapping.attention_dp,
        }
        if mapping.ep > 1:
            tree["moe_expert_parallel_size"] = mapping.ep
        return decode(tree)

    def memory(self, length: int) -> GpuMemory:
        """Of one GPU."""
        gpu_bytes = int(self.gpu.memory_gib * GIB)
        return memory_estimate.estimate(self.arguments(length), self.shape, gpu_bytes, length=length)

    def sequences(self, length: int) -> int:
        """Contexts of ``length`` tokens that the KV caches of all ranks hold at once; 0: not even the weights fit."""
        return self.memory(length).sequences * self.mapping.ranks

    def prefill_ms(self, tokens: int) -> float:
        """From the beginning of a prompt's computation to its first token; one prompt on each rank."""
        own = self.efficiency
        rate = self.gpu.bf16_tflops * 1e9 * own.attention
        ranks = 1 if self.mapping.attention_dp else self.mapping.tp
        attention = sum(self._attended(tokens, window) for window in self.shape.windows) / ranks
        return self._products_ms(tokens) + attention / rate + self._exchange_ms(tokens) + own.prompt_ms

    def step_ms(self, sequences: float, context: float) -> float:
        """Of a decode step, in which ``sequences`` on each rank have ``context`` tokens each."""
        rows = max(1.0, sequences / self.mapping.pp)
        own = self.efficiency
        args = self.arguments(max(1, round(context)))
        value = memory_estimate.kv_bytes(args, self.shape)
        layer = memory_estimate.kv_values(self.shape, args.attention_ranks) * value
        kept = sum(min(context, window) if window else context for window in self.shape.windows)
        read_ms = rows * kept * layer / (self.gpu.hbm_gb_s * 1e6 * own.memory)
        return self._products_ms(rows) + read_ms + self._exchange_ms(rows) + own.step_ms

    def handoff_ms(self, tokens: int) -> float:
        """To move a prompt's KV to a worker of another pool, all ranks at once."""
        layer = (self.shape.latent or 2 * self.shape.kv_heads * self.shape.head_dim) * ACTIVATION_BYTES
        senders = 1 if self.shape.latent else self.mapping.tp
        size = self.shape.layers * layer * tokens / senders
        return size / (self.gpu.link_gb_s * 1e6 * self.efficiency.handoff)

    def _products_ms(self, rows: float) -> float:
        """Of all layers and the head, ``rows`` tokens on each rank."""
        shape, mapping = self.shape, self.mapping
        shared = 1 if mapping.attention_dp else mapping.tp
        all_rows = rows * mapping.ranks
        attention = shape.layers * shape.attention / shared
        common = attention + shape.dense / mapping.tp + self._head / shared
        computed = rows * attention + all_rows * shape.dense / mapping.tp
        total_ms = self._joined(common, computed, shape.linear_bits)
        if (experts := shape.experts) is None:
            return total_ms
        if not experts.per_token:
            raise UnknownShape("config.json has no num_experts_per_tok: how many experts compute a token is unknown")
        # Rows choose experts at random: of this many rows this share of the experts is chosen by at least one.
        chosen = 1 - (1 - experts.per_token / experts.count) ** all_rows
        read = experts.layers * experts.count * chosen * experts.parameters / mapping.tp
        used = experts.layers * experts.per_token * experts.parameters * all_rows / mapping.tp
        total_ms += self._joined(read, used, shape.expert_bits)
        beside = experts.layers * experts.shared / shared
        return total_ms + self._joined(beside, rows * beside, shape.linear_bits)

    @property
    def _head(self) -> float:
        """Parameters of the output layer; the input's are looked up, not read."""
        return float(self.shape.vocab * self.shape.hidden)

    def _joined(self, read: float, used: float, bits: float) -> float:
        """
        Args:
            read: parameters that are read.
            used: parameters that are multiplied with a row, over all rows.
        """
        own = self.efficiency
        reading = read * bits / 8 / (self.gpu.hbm_gb_s * 1e6 * own.memory)
        computing = _OPERATIONS * used / (self.gpu.tflops(bits) * 1e9 * own.products)
        return float((reading**own.blend + computing**own.blend) ** (1 / own.blend))

    def _attended(self, tokens: int, window: int) -> float:
        """Operations of one layer's attention over a prompt."""
        width = _MLA_WIDTH if self.shape.latent else 2 * self.shape.head_dim
        seen = tokens * tokens / 2 if not window or window >= tokens else tokens * window
        return _OPERATIONS * self.shape.heads * width * seen

    def _exchange_ms(self, rows: float) -> float:
        """Of activations between ranks."""
        shape, mapping, own = self.shape, self.mapping, self.efficiency
        rate = self.gpu.link_gb_s * 1e6 * own.link
        row_bytes = shape.hidden * ACTIVATION_BYTES
        other = (mapping.tp - 1) / mapping.tp
        total = 0.0
        if mapping.tp > 1 and not mapping.attention_dp:
            total += 2 * shape.layers * (own.reduce_ms + 2 * other * rows * row_bytes / rate)
        if mapping.attention_dp and shape.experts is not None:
            sent = rows * min(shape.experts.per_token, mapping.tp) * row_bytes * other
            total += 2 * shape.experts.layers * (own.reduce_ms + sent / rate)
        if mapping.pp > 1:
            total += (mapping.pp - 1) * (own.reduce_ms + rows * row_bytes / rate)
        return total


def fits(engine: RooflineEngine, length: int) -> str:
    """Why contexts of ``length`` tokens cannot be served; "": they can."""
    found = engine.memory(length)
    if found.weights + found.reserve >= found.gpu:
        return f"weights of {found.weights / GIB:.0f} GiB a GPU do not fit into {found.gpu / GIB:.0f} GiB"
    if not found.sequences:
        return f"no context of {length} tokens fits into the {found.pool / GIB:.1f} GiB that are left for KV"
    return ""


def most(engine: RooflineEngine, length: int) -> int:
    """Sequences at once, over all ranks."""
    return min(engine.sequences(length), MAX_BATCH * engine.mapping.ranks)


def mappings(shape: Shape, most_gpus: int, *, stages: int = 2) -> Iterator[Mapping]:
    """With powers of two of GPUs, as engines support them; the fewest first.

    Dense models: tensor ranks times pipeline stages. Mixtures of experts: the same tensor ranks with whole experts on
    each (TEP), and ranks that attend to sequences of their own (DEP).

    Args:
        stages: of a pipeline, at most.
    """
    tp = 1
    while tp <= most_gpus:
        if _divides(shape, tp):
            if shape.experts is None or tp == 1:
                yield Mapping(tp=tp)
            elif shape.experts.count % tp == 0:
                yield Mapping(tp=tp, ep=tp)
        if tp > 1 and shape.experts is not None and shape.experts.count % tp == 0:
            yield Mapping(tp=tp, ep=tp, attention_dp=True)
        pp = 2
        while shape.experts is None and pp <= stages and tp * pp <= most_gpus:
            if _divides(shape, tp) and shape.layers % pp == 0:
                yield Mapping(tp=tp, pp=pp)
            pp *= 2
        tp *= 2


def _divides(shape: Shape, ranks: int) -> bool:
    """Whether heads, and KV heads or their copies, are the same number on each rank; KV copies waste memory."""
    if shape.heads % ranks:
        return False
    return not shape.kv_heads or shape.kv_heads % ranks == 0


_POINTS = 10


def roofline_profile(engine: RooflineEngine, *, isl: int, osl: int, up: str = "") -> Profile:
    """Around prompts of ``isl`` and answers of ``osl`` tokens. The engine holds at least one such context."""
    length = isl + osl
    mapping = engine.mapping
    limit = min(engine.shape.max_len or 4 * length, max(4 * length, 8192))
    # Pipeline stages compute as many prompts at once as there are stages.
    ranks = mapping.ranks * mapping.pp
    setup = Setup(
        model=engine.shape.model,
        api="chat",
        gpus=mapping.gpus,
        attention_dp=ranks,
        osl=osl,
        max_context=limit,
        max_kv_tokens=engine.sequences(length) * length,
        max_batch=most(engine, length),
        up=up,
    )

    def most_at_once(tokens: int) -> int:
        return min(setup.max_batch, max(1, int(setup.max_kv_tokens / (tokens + osl))))

    return modelled(
        setup,
        "roofline estimate",
        sorted({*spaced(SHORTEST, limit, _POINTS), isl}),
        engine.prefill_ms,
        [
            (tokens, level)
            for tokens in sorted({*spaced(SHORTEST, limit - osl, 5), isl})
            for level in spaced(1, most_at_once(tokens), _POINTS)
        ],
        lambda level, context: engine.step_ms(level / mapping.ranks, context),
    )
