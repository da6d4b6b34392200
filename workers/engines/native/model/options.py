"""The options of a native engine. This module does not import torch."""

from dataclasses import dataclass

NGRAM = "ngram"  # instead of a draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """How to load a model, and the sizes and policies of its engine.

    Attributes:
        block_size: tokens per KV block.
        kv_blocks: 0: as many as free memory allows.
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        mixed_chunk_tokens: see ``SchedulerConfig``.
        max_model_len: prompt + output of one sequence, tokens; 0: the model's own limit.
        device: "auto", "cpu" or "cuda"; "auto": CUDA if there is a device.
        dtype: of the weights; "auto": float32 on a CPU, otherwise that of the checkpoint.
        threads: torch's, for this process; 0: as many as there are free cores on a CPU, see ``cpu_budget``.
        embed_slots: images whose embeddings a vision model keeps; 0: 256, or fewer if memory is short.
        kv_dtype: of the KV cache; "auto": the weights'.
        kv_memory_fraction: for the KV cache, of the memory that weights, logits and ``transfer_bytes`` leave; 0: 0.85
            on CUDA, a quarter on a CPU.
        transfer_bytes: of a GPU's memory, for KV from workers of other widths.
        no_evict: see ``Scheduler``.
        hybrid_kv_cache: keep layers with sliding windows in a pool of their own, and free blocks that have left them.
        kv_offloading_size: GiB of host memory for KV that leaves the pools; 0: none.
        kv_disk: folder for KV blocks that leave host memory, of which there is ``DISK_HOST_GIB`` at least; "": none.
        kv_disk_bytes: of files in it, at most.
        quantization: of the weights; "fp8": 8-bit floats with a scale per row, "": as loaded.
        speculative_model: proposes tokens: a draft model or EAGLE-3 head, as ``model`` of ``build``, or "ngram"; "":
            none.
        num_speculative_tokens: proposed per step and sequence, at most.
        prompt_lookup_min, prompt_lookup_max: tokens that "ngram" must find again.
        batch_invariant: on CUDA, compute each sequence in the same way whatever runs beside it, which takes longer.
        max_loras: LoRA adapters on the device at once; 0: none are taken.
        max_lora_rank: of an adapter.
        tensor_parallel_size: ranks that share each layer, each with a GPU of its own.
        warm: compute a short request first, so that no client waits while libraries load and kernels are chosen.
    """

    block_size: int = 32
    kv_blocks: int = 0
    max_running: int = 256
    max_batched_tokens: int = 8192
    mixed_chunk_tokens: int = 0
    max_model_len: int = 0
    prefix_cache: bool = True
    kv_events: bool = True
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    embed_slots: int = 0
    kv_dtype: str = "auto"
    kv_memory_fraction: float = 0.0
    transfer_bytes: int = 0
    no_evict: bool = False
    hybrid_kv_cache: bool = True
    kv_offloading_size: float = 0.0
    kv_disk: str = ""
    kv_disk_bytes: int = 1 << 36
    quantization: str = ""
    speculative_model: str = ""
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    batch_invariant: bool = False
    max_loras: int = 0
    max_lora_rank: int = 32
    tensor_parallel_size: int = 1
    warm: bool = False

    @property
    def drafts(self) -> bool:
        """Whether a draft model or EAGLE-3 head proposes tokens."""
        return self.speculative_model not in ("", NGRAM)


DEFAULTS = NativeOptions()
