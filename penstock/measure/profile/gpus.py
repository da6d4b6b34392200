"""Peak rates of GPUs, from NVIDIA's data sheets, and what share of them engines were measured to reach.

Rates are dense (without sparsity), links are per direction. Data sheets: A100 80 GB SXM, H100 SXM, H200 SXM, HGX B200,
L40S, all by NVIDIA. The L40S has no NVLink: its link is PCIe 4.0 x16.
"""

from msgspec import Struct


class Gpu(Struct, frozen=True, kw_only=True):
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
        """Of products of weights with so many bits."""
        if bits < 8:
            return self.fp4_tflops or self.fp8_tflops or self.bf16_tflops
        return self.fp8_tflops or self.bf16_tflops if bits < 16 else self.bf16_tflops


GPUS = {
    "A100": Gpu(bf16_tflops=312, hbm_gb_s=2039, memory_gib=79.3, link_gb_s=300),
    "H100": Gpu(bf16_tflops=989, fp8_tflops=1979, hbm_gb_s=3350, memory_gib=79.6, link_gb_s=450),
    "H200": Gpu(bf16_tflops=989, fp8_tflops=1979, hbm_gb_s=4800, memory_gib=140.4, link_gb_s=450),
    "B200": Gpu(bf16_tflops=2250, fp8_tflops=4500, fp4_tflops=9000, hbm_gb_s=8000, memory_gib=179.0, link_gb_s=900),
    "L40S": Gpu(bf16_tflops=362, fp8_tflops=733, hbm_gb_s=864, memory_gib=44.5, link_gb_s=32),
}


class Efficiency(Struct, frozen=True, kw_only=True):
    """Shares of the peak rates that an engine reaches, and times that no rate explains.

    The defaults are of the native engine on one H200 with an 8B Llama shape in bf16 (docs/benchmarks.md); how well they
    fit is in docs/planner.md. Products of prompts 640 of 989 TFLOP/s, attention of prompts 550, weights and KV 4.0 of
    4.8 TB/s, KV of a prompt between two GPUs 250 of 450 GB/s. All-reduce was not measured: 70 % of the link and 10 µs
    are assumptions.

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
