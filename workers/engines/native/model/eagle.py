"""Speculation with an EAGLE-3 head: one layer that continues from hidden states of the target.

Slot i of the head's KV belongs to the target's hidden states at token i, and to token i + 1; from both the head
predicts token i + 2. For further proposals, its own hidden state at the slot before replaces the target's. The KV lies
in a pool of its own under the target's block numbers, and follows one step behind the target's. Blocks that came from
elsewhere lack it: the head sees only what is after them, so its proposals are worse, and the output stays exact. The
last slot of a cached prefix has the token that was after it before, which may be another one.

Format and computation are those of https://arxiv.org/abs/2503.01840, as SafeAILab, SGLang and vLLM publish such heads.
"""

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import huggingface_hub
import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from penstock.infra.model.defaults import rope_type, ropes
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.attention import ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.loading import BATCH_DEPENDENT_ROPE, check_values, first_line
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.pool import KvPool, KvShape, device_errors, zeros
from penstock.workers.engines.native.model.sampler import choose

ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_UNUSED = ("t2d", "verifier_", "rotary_emb.", "midlayer.self_attn.rotary_emb.")  # names of tensors that nothing needs
_NO_OPTIONS = ("architectures", "model_type", "transformer_layer_config", "auto_map")
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")  # variants that are not computed here


class EagleHead(nn.Module):
    """A head, with the interface of transformers' causal language models. Its logits are of the target's vocabulary.

    Args:
        tensors: its own; products have a bias if there is one. ``places``: the token of each logit; if missing, all.
        vocab: tokens of the target.
        inputs: size of the target's hidden states that ``fc`` joins.
        layers: those whose inputs these are; the number of all layers: the output of the last.
    Attributes:
        out: receives the hidden state of each row of logits, which the next slot continues from.
    """

    def __init__(
        self, config: LlamaConfig, tensors: Mapping[str, Tensor], vocab: int, inputs: int, layers: Seq[int]
    ) -> None:
        super().__init__()
        hidden = config.hidden_size

        def linear(path: str, columns: int, outputs: int) -> nn.Linear:
            return nn.Linear(columns, outputs, bias=f"{path}.bias" in tensors)

        self.config, self.layers, self._vocab = config, tuple(layers), vocab
        self.out: Tensor | None = None
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.window = int(window) if window else None
        self.before_residual = bool(getattr(config, "norm_before_residual", False))
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.fc = linear("fc", inputs * len(self.layers), hidden)
        self.midlayer = layer = nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, self.norm = (
            LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(4)
        )
        attn = layer.self_attn = LlamaAttention(config, 0)
        dim, above = attn.head_dim, "midlayer.self_attn"
        attn.q_proj = linear(f"{above}.q_proj", 2 * hidden, config.num_attention_heads * dim)
        attn.k_proj = linear(f"{above}.k_proj", 2 * hidden, config.num_key_value_heads * dim)
        attn.v_proj = linear(f"{above}.v_proj", 2 * hidden, config.num_key_value_heads * dim)
        attn.o_proj = linear(f"{above}.o_proj", config.num_attention_heads * dim, hidden)
        layer.mlp = LlamaMLP(config)
        places = tensors.get("places")
        self.rotary_emb: nn.Module = LlamaRotaryEmbedding(config)
        self.lm_head = linear("lm_head", hidden, vocab if places is None else len(places))
        self.places: Tensor | None
        self.register_buffer("places", None if places is None else torch.zeros_like(places))

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        paged: attention.Paged | None = None,
    ) -> Any:
        """
        Args:
            input_ids: (1, rows), of each slot.
            hidden: (rows, hidden), what ``fc`` made of the target's hidden states, or ``out``; None: the embeddings,
                to compare kernels.
            logits_to_keep: (n,) int64, rows; 0: all.
        Returns: ``logits``, (1, n, vocab); to compare kernels, of the tokens that it proposes only.
        """
        layer: Any = self.midlayer
        embedded = self.embed_tokens(input_ids)
        state = embedded if hidden is None else hidden.unsqueeze(0)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        mask = None
        if paged is None:
            lowest = torch.finfo(embedded.dtype).min
            mask = embedded.new_full((1, 1, *[input_ids.shape[1]] * 2), lowest).triu(1)
        normal = layer.hidden_norm(state)
        residual = normal if self.before_residual else state
        joined = torch.cat([layer.input_layernorm(embedded), normal], -1)
        cosines = self.rotary_emb(embedded, position_ids)
        attended, _ = layer.self_attn(joined, cosines, mask, paged=paged, sliding_window=self.window)
        state = residual + attended
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        if isinstance(logits_to_keep, Tensor):
            state = state[:, logits_to_keep]
        if self.out is not None:
            self.out[: state.shape[1]].copy_(state[0])
        logits = self.lm_head(self.norm(state))
        if self.places is not None and hidden is not None:
            every = logits.new_full((1, logits.shape[1], self._vocab), float("-inf"))
            logits = every.index_copy_(2, self.places, logits)
        return SimpleNamespace(logits=logits)


def head_config(name: str) -> dict[str, Any] | None:
    """The configuration of the EAGLE-3 head of this name; None: it is none, or cannot be read."""
    try:
        found: dict[str, Any] = LlamaConfig.get_config_dict(name)[0]
    except Exception:  # of transformers' and its helpers, of any kind; the loader of draft models explains it
        return None
    return found if ARCHITECTURES.intersection(found.get("architectures") or ()) else None


def load_head(name: str, written: Mapping[str, Any], target: Model) -> Model:
    """Load the head of a folder or Hugging Face id for a target.

    Args:
        written: of ``head_config``.
    Raises:
        UnsupportedModel: it is not one for this target, has another form, or cannot be loaded.
    """
    attention.register()

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModel(f"the EAGLE-3 head {name!r} cannot be used: {reason}")

    fields = {**written, **(written.get("transformer_layer_config") or {})}
    if fields.get("num_hidden_layers", 1) != 1:
        refuse(f"it has {fields['num_hidden_layers']} layers, and heads of one are supported")
    if found := [each for each in _UNKNOWN if written.get(each)]:
        refuse(f"config.json sets {found[0]}, which is not supported; use a head without it")
    layers, embedding = _layers(target), target.forward.get_input_embeddings().weight
    if layers is None:
        refuse(f"the layers of {type(target.forward).__name__} are not found; use a draft model instead")
    try:
        config = LlamaConfig(**{key: value for key, value in fields.items() if key not in _NO_OPTIONS})
        config._attn_implementation = attention.NAME
    except Exception as error:  # of transformers', of any kind
        refuse(f"config.json: {first_line(error)}")
    if kind := BATCH_DEPENDENT_ROPE.intersection(map(rope_type, ropes(config.to_dict()))):
        refuse(f"its RoPE is of type {min(kind)}, which depends on other requests; use another head")
    ids = _layer_ids(written, len(layers))
    if min(ids) < 0 or max(ids) > len(layers):
        refuse(f"it takes the inputs of layers {ids}, and the model has layers 0 to {len(layers) - 1}")
    tensors = _tensors(name)
    _complete(tensors, fields, config, target, refuse)
    if "fc.weight" in tensors and (columns := tensors["fc.weight"].shape[-1]) != len(ids) * embedding.shape[1]:
        refuse(
            f"fc.weight takes {columns} values, and the model gives {len(ids)} hidden states of {embedding.shape[1]}; "
            "use the head that was made for this model"
        )
    with torch.device("meta"):
        head = EagleHead(config, tensors, target.vocab_size, embedding.shape[1], ids)
    wanted = head.state_dict()
    if lacking := sorted(wanted.keys() - tensors.keys()):
        refuse(f"it lacks {lacking[0]}; download it again")
    if extra := sorted(tensors.keys() - wanted.keys()):
        refuse(f"it has {extra[0]}, which heads of the supported form do not have")
    for each, tensor in tensors.items():
        if tensor.shape != wanted[each].shape:
            refuse(f"{each} is of size {list(tensor.shape)}, and by config.json it has {list(wanted[each].shape)}")
        if tensor.is_floating_point():
            tensors[each] = tensor.to(target.device, target.dtype)
    head.load_state_dict(tensors, assign=True)
    head.rotary_emb = LlamaRotaryEmbedding(config)  # which is not stored
    head = head.to(target.device).eval().requires_grad_(False)
    check_values(name, dict(head.named_parameters()))
    return Model(
        forward=head,
        shape=KvShape(1, config.num_key_value_heads, config.head_dim),
        dtype=target.dtype,
        device=target.device,
        vocab_size=target.vocab_size,
        max_positions=max(target.max_positions, target.most_positions),  # no limit of its own
        eos_token_ids=(),
        heads=config.num_attention_heads,
        windows=(head.window,),
    )


def _layers(target: Model) -> nn.ModuleList | None:
    """The layers of a model; None: they are kept in another way than usual."""
    layers = getattr(target.forward.get_decoder(), "layers", None)
    return layers if isinstance(layers, nn.ModuleList) and len(layers) == target.shape.layers else None


def _complete(
    tensors: dict[str, Tensor],
    fields: Mapping[str, Any],
    config: LlamaConfig,
    target: Model,
    refuse: Callable[[str], NoReturn],
) -> None:
    """Add the embeddings that a head shares with its target, and check which tokens it proposes."""
    vocab, hidden = target.vocab_size, config.hidden_size
    if (named := int(fields.get("vocab_size") or vocab)) != vocab:
        refuse(f"it is for {named} tokens, and the model has {vocab}; a head needs the same tokenizer")
    for each, module in (
        ("embed_tokens", target.forward.get_input_embeddings()),
        ("lm_head", target.forward.get_output_embeddings()),
    ):
        shared = getattr(module, "weight", None)
        if f"{each}.weight" in tensors:
            continue
        if each == "lm_head" and int(fields.get("draft_vocab_size") or vocab) != vocab:
            refuse("it lacks lm_head.weight; download it again")
        if shared is None or shared.shape != (vocab, hidden):
            found = "split over GPUs" if shared is None else f"of size {list(shared.shape)}, not {[vocab, hidden]}"
            refuse(f"it has no {each}.weight, and the model's is {found}")
        tensors[f"{each}.weight"] = shared.data
    proposed, places = len(tensors["lm_head.weight"]), tensors.pop("d2t", None)
    if proposed != int(fields.get("draft_vocab_size") or proposed):
        refuse(f"lm_head.weight has {proposed} tokens, and by config.json it has {fields['draft_vocab_size']}")
    if places is None:
        if proposed != vocab:
            refuse(f"it proposes {proposed} of {vocab} tokens and lacks d2t, which says which; download it again")
        return
    places = places.to(torch.int64) + torch.arange(len(places))  # stored as differences
    if len(places) != proposed or len(set(places.tolist())) != proposed or places.min() < 0 or places.max() >= vocab:
        refuse(f"d2t does not name another one of the model's {vocab} tokens for each of the {proposed} proposed")
    tensors["places"] = places


def _layer_ids(written: Mapping[str, Any], layers: int) -> list[int]:
    """The layers whose inputs a head takes. In ``eagle_config`` (SGLang) are those whose outputs it takes."""
    if named := written.get(_LAYER_IDS):
        return [int(each) for each in named]
    if named := (written.get("eagle_config") or {}).get(_LAYER_IDS):
        return [int(each) + 1 for each in named]
    return [2, layers // 2, layers - 3]


def _tensors(name: str) -> dict[str, Tensor]:
    """The tensors of a folder, or of a Hugging Face id, by their names in SGLang's form.

    Raises:
        UnsupportedModel: they cannot be read.
    """
    found: dict[str, Tensor] = {}
    try:
        folder = Path(name)
        if not folder.is_dir():
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118 - it is no mapping
        if not found:
            for file in sorted(folder.glob("pytorch_model*.bin")):
                found |= torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any library, of any kind
        raise UnsupportedModel(f"cannot load the EAGLE-3 head {name!r}: {first_line(error)}") from error
    plain = {each.removeprefix("model.").replace("layers.0.", "midlayer."): value for each, value in found.items()}
    return {each: value for each, value in plain.items() if not each.startswith(_UNUSED)}


class AuxiliaryStates:
    """Hidden states of the target's last step.

    Args:
        rows: the most of a step.
    Attributes:
        states: (rows, all of them one after the other).
        first_rows: the first row of each sequence of that step, in the order of its plan; None: the plan's own.
    """

    def __init__(self, target: Model, head: EagleHead, rows: int) -> None:
        layers, size = _layers(target), head.fc.in_features // len(head.layers)
        assert layers is not None
        self.states = zeros((rows, head.fc.in_features), target.dtype, target.device)
        self.first_rows: Callable[[], Seq[int] | None] = lambda: None
        self._hooks = []
        for number, layer in enumerate(head.layers):
            part = self.states[:, number * size : (number + 1) * size]

            def keep(hidden: Tensor, part: Tensor = part) -> None:
                part[: hidden.shape[-2]].copy_(hidden[0])  # a copy: kernels add to hidden states in place

            def before(module: Any, args: Any, kwargs: Any, keep: Any = keep) -> None:
                keep(args[0] if args else kwargs["hidden_states"])

            def behind(module: Any, args: Any, output: Any, keep: Any = keep) -> None:
                keep(output if isinstance(output, Tensor) else output[0])

            self._hooks.append(
                layers[layer].register_forward_pre_hook(before, with_kwargs=True)
                if layer < len(layers)
                else layers[-1].register_forward_hook(behind)
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.states = self.states[:0]


@dataclass(slots=True, eq=False)
class HeadView:
    """A sequence as the head computes it, since an admission; kept in ``Sequence.drafter_state``.

    Attributes:
        blocks: those of the admission.
        base: the first token with a slot.
        shifted: a sequence whose tokens are those of the slots: position i has token base + i + 1. So its draws have
            the noise of the target's.
    """

    blocks: list[int]
    base: int
    shifted: Sequence

    def update(self, tokens: list[int], block_size: int) -> None:
        """Take over new tokens and blocks."""
        shifted = self.shifted
        shifted.tokens += tokens[self.base + 1 + len(shifted.tokens) :]
        if shifted.blocks is not self.blocks:
            shifted.blocks += self.blocks[self.base // block_size + len(shifted.blocks) :]


class _PlannedRows(NamedTuple):
    """Of one sequence in the target's last step."""

    sequence: Sequence
    view: HeadView
    start: int
    tokens: int  # without proposals
    draft: Seq[int]
    generations: list[int]  # of the blocks of these rows


class HeadRun(NamedTuple):
    """Slots to compute.

    Attributes:
        start: the first slot.
        row: of the target's last step, which has its hidden states.
        number: in the plan, of the sequence that tokens are proposed for; -1: none are.
        limit: tokens to propose after the last slot.
    """

    view: HeadView
    start: int
    slots: int
    row: int
    number: int
    limit: int


class HeadRuns:
    """Which slots a step of the head computes. Pure.

    Args:
        generations: of the blocks, see ``BlockManager``.
    """

    def __init__(self, generations: "array[int]", block_size: int) -> None:
        self._generations, self._size = generations, block_size
        self._written: dict[int, int] = {}  # blocks whose slots are all computed: their generation then
        self._last: list[_PlannedRows] = []
        self._live: list[tuple[Sequence, HeadView]] = []
        self._ended: list[HeadView] = []

    def take(self, plan: list[ScheduledSequence], limits: Seq[int], rows: Seq[int] | None = None) -> list[HeadRun]:
        """The slots whose hidden states the target's last step computed.

        Args:
            plan, limits: of the next step, as ``Drafter.propose`` gets them.
            rows: the first row of each sequence in the last step; None: they are in the order of its plan.
        """
        for view in self._ended:
            view.shifted.blocks = []
        wanted = {scheduled.sequence: number for number, scheduled in enumerate(plan) if limits[number]}
        runs, at = [], 0
        for number, last in enumerate(self._last):
            row, at = (at if rows is None else rows[number]), at + last.tokens + len(last.draft)
            sequence, view, start = last.sequence, last.view, last.start
            end, tokens = start + last.tokens, sequence.tokens
            for token in last.draft:
                if end >= len(tokens) or tokens[end] != token:
                    break
                end += 1
            end = min(end, len(tokens) - 1)  # the token after the last slot is known
            if end <= start or self._numbers(view, start, start + last.tokens + len(last.draft)) != last.generations:
                continue  # nothing is new, or it has ended and its blocks are another's
            view.update(tokens, self._size)
            self._note(view, start, end)
            planned = wanted.get(sequence, -1) if sequence.drafter_state is view else -1
            if planned >= 0 and plan[planned].start != end:
                planned = -1
            limit = limits[planned] if planned >= 0 else 0
            runs.append(HeadRun(view, start - view.base, end - start, row, planned, limit))
        return runs

    def planned(self, plan: list[ScheduledSequence], drafts: Seq[Seq[int]]) -> None:
        """Note what the target computes next, after ``take``."""
        self._last = []
        for scheduled, draft in zip(plan, drafts, strict=True):
            sequence, start, size = scheduled.sequence, scheduled.start, scheduled.count
            view = sequence.drafter_state
            if not isinstance(view, HeadView) or view.blocks is not sequence.blocks:
                view = sequence.drafter_state = self._view(sequence, start)
                self._live.append((sequence, view))
            numbers = self._numbers(view, start, start + size + len(draft))
            self._last.append(_PlannedRows(sequence, view, start, size, draft, numbers))
        self._ended = [view for sequence, view in self._live if sequence.blocks is not view.blocks]
        self._live = [(sequence, view) for sequence, view in self._live if sequence.blocks is view.blocks]

    def _view(self, sequence: Sequence, start: int) -> HeadView:
        """Of a sequence whose first ``start`` tokens are cached."""
        size, base, blocks = self._size, start, sequence.blocks
        if not base % size:
            while base and self._written.get(block := blocks[base // size - 1]) == self._generations[block]:
                base -= size
        sampling = sequence.sampling
        if sampling.logprobs is not None:
            sampling = msgspec.structs.replace(sampling, logprobs=None)
        shifted = replace(
            sequence,
            tokens=[],
            prompt_len=sequence.prompt_len - base - 1,
            stoppable=sequence.stoppable - base - 1,
            sampling=sampling,
            blocks=blocks if base < size else [],
            draft=(), media=(), adapter_slot=-1, state=None, drafter_state=None, positions=None,
        )  # fmt: skip
        return HeadView(blocks, base, shifted)

    def _numbers(self, view: HeadView, start: int, end: int) -> list[int]:
        blocks = view.blocks[start // self._size : -(-end // self._size)]
        return [self._generations[block] for block in blocks]

    def _note(self, view: HeadView, start: int, end: int) -> None:
        """Note the blocks that slots ``start`` to ``end`` complete."""
        if view.base % self._size:
            return  # slots lie elsewhere than tokens
        for block in view.blocks[start // self._size : end // self._size]:
            self._written[block] = self._generations[block]


class EagleDrafter:
    """Implements ``penstock.workers.engines.core.engine.Drafter``. Owns head and pool.

    Args:
        head: its ``forward`` is an ``EagleHead``.
    """

    def __init__(self, head: Model, pool: KvPool, auxiliary: AuxiliaryStates, runs: HeadRuns, max_running: int) -> None:
        self._head: Model | None = head
        self._pool: KvPool | None = pool
        self.auxiliary, self._runs = auxiliary, runs
        self._module: EagleHead = head.forward
        self._module.out = zeros((2 * max_running, head.forward.config.hidden_size), head.dtype, head.device)

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        assert self._head is not None, "closed"
        drafts: list[list[int]] = [[] for _ in plan]
        with device_errors(), torch.inference_mode():
            if runs := self._runs.take(plan, limits, self.auxiliary.first_rows()):
                self._draft(runs, drafts)
        self._runs.planned(plan, drafts)
        return drafts

    def _draft(self, runs: list[HeadRun], drafts: list[list[int]]) -> None:
        """Compute all slots, and append the proposals after those of each run with a limit."""
        assert self._module.out is not None
        rows = [row for run in runs for row in range(run.row, run.row + run.slots)]
        hidden = self._module.fc(self.auxiliary.states[torch.tensor(rows, device=self._module.device)])
        tokens = [run.view.shifted.tokens[run.start : run.start + run.slots] for run in runs]
        drawing = [number for number, run in enumerate(runs) if run.limit]
        while True:
            drawn = self._compute(runs, tokens, drawing, hidden)
            for number, token in zip(drawing, drawn, strict=True):
                drafts[runs[number].number].append(token)
            left = [number for number in drawing if runs[number].limit > 1]
            if not left:
                return
            hidden = self._module.out[[drawing.index(number) for number in left]]
            tokens = [drafts[runs[number].number][-1:] for number in left]
            runs = [
                run._replace(start=run.start + run.slots, slots=1, limit=run.limit - 1)
                for run in (runs[number] for number in left)
            ]
            drawing = list(range(len(runs)))

    def _compute(self, runs: list[HeadRun], tokens: list[list[int]], drawing: list[int], hidden: Tensor) -> list[int]:
        """Compute slots from their tokens and hidden states, and draw a token after each run of ``drawing``."""
        assert self._head is not None
        assert self._pool is not None
        spans, ends, row = [], [], 0
        positions: list[int] = []
        for run in runs:
            spans.append(TokenSpan(row, run.start, run.slots, run.view.shifted.blocks))
            positions += range(run.start, run.start + run.slots)
            row += run.slots
            ends.append(row - 1)
        wanted = [ends[number] for number in drawing]
        inputs, places, last = (
            torch.tensor(n, device=self._head.device)
            for n in ([token for part in tokens for token in part], positions, wanted or [0])
        )
        logits = self._head.logits(inputs, places, last, ReferenceAttention(self._pool, spans), hidden=hidden)
        if not wanted:
            return []
        drawn = [runs[number] for number in drawing]
        sequences, lengths = [run.view.shifted for run in drawn], [run.start + run.slots for run in drawn]
        chosen: list[int] = choose(logits, sequences, lengths).tokens.tolist()
        return chosen

    def close(self) -> None:
        """Free weights and pool."""
        self._head = self._pool = self._module.out = None
        self.auxiliary.close()
