"""LoRA adapters beside the products of a model: slots of a fixed size, and the rows of a batch that use each.

Every linear layer within the decoder's layers has room for the matrices of ``slots`` adapters of any rank up to the
limit, allocated before the KV cache. A batch says which of its rows use which slot; a hook after each product adds
what the adapters of these rows add. Rows without an adapter are not touched.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.infra.model.adapter import SHOWN, WEIGHTS, AdapterError, AdapterFolder
from penstock.workers.engines.native.model.model import Model, UnsupportedModel

NO_SLOT = -1


class Part(NamedTuple):
    """A linear layer of the original model: some of the outputs of a product that may compute several layers.

    Attributes:
        path: of the layer in the model, as adapters name it.
        product: the module that computes it.
        start, size: of its outputs.
    """

    path: str
    product: Any
    start: int
    size: int


class SlotRows(NamedTuple):
    """Neighbouring rows of a batch that use one slot."""

    slot: int
    start: int
    rows: int


class HostMatrices(NamedTuple):
    """An adapter's matrices for one layer, in host memory: (rank, inputs) and, with its scale, (rank, outputs)."""

    product: int  # number of the product
    part: int  # of it
    down: Tensor
    up: Tensor


def parts_of(model: Any) -> list[Part]:
    """The layers that adapters can change: linear ones of the decoder, without the output layer and experts."""
    head = model.get_output_embeddings()
    found: list[Part] = []
    covered = set() if head is None else {id(each) for each in head.modules()}
    for path, module in model.named_modules():  # those of a module come after it
        if id(module) in covered or ".experts." in f".{path}.":
            continue
        if hasattr(module, "parts"):  # of ``cuda.modules``: it computes several layers
            found += [Part(*part) for part in module.parts(path)]
            covered.update(id(part.product) for part in found)
        elif isinstance(module, nn.Linear) or hasattr(module, "takes_gemv"):
            found.append(Part(path, module, 0, module.out_features))
    return found


def places_of(model: Any) -> dict[str, Tensor]:
    """Where a model, rewritten or not, has the weights of the original: views by their names there."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places = {name: each.data for name, each in tensors}
    for part in parts_of(model):
        for kind in ("weight", "bias", "scale"):
            if (whole := getattr(part.product, kind, None)) is not None:
                places[f"{part.path}.{kind}"] = whole.data[part.start : part.start + part.size]
                if getattr(part.product, "group", None) is not None:  # as of ``parallel.RowParallel``
                    places[f"{part.path}.linear.{kind}"] = places[f"{part.path}.{kind}"]
    return places


class ProductSlots:
    """The slots of one product.

    Args:
        parts: the layers that it computes, in the order of their outputs.
        ranks: (slots, parts or more) int32: the rank of each part's matrices in a slot; 0: it has none.
    """

    def __init__(self, parts: Sequence[Part], slots: int, rank: int, dtype: torch.dtype, ranks: Tensor) -> None:
        weight = parts[0].product.weight
        self.parts, self.rank, self.ranks = parts, rank, ranks
        self.outputs, self.inputs = weight.shape
        self.down = torch.zeros((slots, len(parts), rank, self.inputs), dtype=dtype, device=weight.device)
        self.up = torch.zeros((slots, rank, self.outputs), dtype=dtype, device=weight.device)

    def put(self, slot: int, matrices: HostMatrices) -> None:
        """Copy a part's matrices into a slot."""
        rank, part = len(matrices.down), self.parts[matrices.part]
        self.down[slot, matrices.part, :rank].copy_(matrices.down, non_blocking=True)
        self.up[slot, :rank, part.start : part.start + part.size].copy_(matrices.up, non_blocking=True)


class TorchAdapters:
    """The adapters of a model. One batch at a time: ``begin``, then a forward pass.

    Args:
        model: a loaded model, rewritten or not. Its products get hooks.

    Raises:
        UnsupportedModel: no layer can have adapters.
    Attributes:
        active: a row of the batch has an adapter.
    """

    def __init__(self, model: Model, slots: int, rank: int) -> None:
        if model.multimodal:
            raise UnsupportedModel("LoRA adapters of vision models are not supported; leave out --lora, --lora-folder")
        by_product: dict[int, list[Part]] = {}
        for part in parts_of(model.forward):
            if model.shape.latent and part.path.endswith(".kv_b_proj"):
                continue  # its weight is multiplied by queries, too
            by_product.setdefault(id(part.product), []).append(part)
        if not by_product or any(getattr(each[0].product, "scale", None) is not None for each in by_product.values()):
            raise UnsupportedModel(f"no layer of {type(model.forward).__name__} can have LoRA adapters")
        most = max(map(len, by_product.values()))
        self.active = False
        self._slots = slots
        self._dtype, self._device = model.dtype, model.device
        self._host_ranks = [[[0] * most for _ in range(slots)] for _ in by_product]  # of products, slots, parts
        self._ranks = torch.zeros((len(by_product), slots, most), dtype=torch.int32, device=model.device)
        self.products = [
            ProductSlots(sorted(parts, key=lambda part: part.start), slots, rank, model.dtype, self._ranks[number])
            for number, parts in enumerate(by_product.values())
        ]
        self._places = {
            part.path: (number, at)
            for number, product in enumerate(self.products)
            for at, part in enumerate(product.parts)
        }
        self._rows: list[tuple[int, Tensor]] = []
        for number, product in enumerate(self.products):
            module = product.parts[0].product
            module.register_forward_hook(self._hook(number))
            module.__dict__["adapters"] = self  # no child: the model has none of its weights

    @property
    def bytes(self) -> int:
        return sum(each.down.nbytes + each.up.nbytes for each in self.products)

    def _hook(self, number: int) -> Any:
        def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.active:
                self.add(number, inputs[0], output)

        return add

    # -- adapters --------------------------------------------------------------------------------------------

    def matrices(self, folder: AdapterFolder) -> list[HostMatrices]:
        """Read an adapter.

        Raises:
            AdapterError: it does not fit the model, or its file cannot be read.
        """
        unknown = sorted(path for path in folder.modules if path not in self._places)
        if unknown:
            shown = ", ".join(unknown[:SHOWN])
            raise AdapterError(
                f"the adapter in {folder.path} changes {len(unknown)} modules that cannot have one here ({shown}): "
                "only linear layers of attention and MLP can, without kv_b_proj; is it of another model?"
            )
        found = []
        try:
            with safe_open(folder.path / WEIGHTS, framework="pt") as opened:
                for path, names in folder.modules.items():
                    number, at = self._places[path]
                    product = self.products[number]
                    size = product.parts[at].size
                    if (names.inputs, names.outputs) != (product.inputs, size):
                        raise AdapterError(
                            f"the adapter in {folder.path} takes {names.inputs} inputs to {names.outputs} outputs in "
                            f"{path}, and the model {product.inputs} to {size}: it is of another model"
                        )
                    down, up = opened.get_tensor(names.down), opened.get_tensor(names.up)
                    down, up = down.to(self._dtype), (up.float() * folder.scale).t().to(self._dtype)
                    if not (down.isfinite().all() and up.isfinite().all()):
                        raise AdapterError(
                            f"the adapter in {folder.path} has weights in {path} that are NaN, infinite or too large "
                            f"for the model's {self._dtype}"
                        )
                    found.append(HostMatrices(number, at, self._pinned(down), self._pinned(up)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise AdapterError(f"{folder.path / WEIGHTS} cannot be read: {error}") from error
        return found

    def _pinned(self, tensor: Tensor) -> Tensor:
        """A copy of its own, page-locked where that lets the device copy without waiting."""
        tensor = tensor.contiguous().clone()
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def copy(self, slot: int, matrices: object) -> None:
        """Bring an adapter into a slot; steps that were begun before still see the adapter that was there."""
        assert isinstance(matrices, list)
        with torch.inference_mode():
            for product in self._host_ranks:
                product[slot] = [0] * len(product[slot])
            for each in matrices:
                self.products[each.product].put(slot, each)
                self._host_ranks[each.product][slot][each.part] = len(each.down)
            self._ranks[:, slot].copy_(torch.tensor([product[slot] for product in self._host_ranks], dtype=torch.int32))

    # -- a batch ---------------------------------------------------------------------------------------------

    def begin(self, rows: Iterable[SlotRows]) -> None:
        """Say which rows of the next batch use which slot."""
        by_slot: dict[int, list[int]] = {}
        for slot, start, number in rows:
            if slot != NO_SLOT:
                by_slot.setdefault(slot, []).extend(range(start, start + number))
        self._rows = [(slot, torch.tensor(places, device=self._device)) for slot, places in by_slot.items()]
        self.active = bool(self._rows)

    def add(self, number: int, x: Tensor, out: Tensor) -> None:
        """Add to a product's outputs what the adapters of the batch add.

        Args:
            x: (…, rows, inputs).
            out: (…, rows, outputs), changed.
        """
        product = self.products[number]
        inputs, outputs = x.reshape(-1, product.inputs), out.view(-1, product.outputs)
        for slot, rows in self._rows:
            chosen = inputs.index_select(0, rows)
            for at, part in enumerate(product.parts):
                rank = self._host_ranks[number][slot][at]
                if rank:
                    hidden = chosen @ product.down[slot, at, :rank].t()
                    columns = slice(part.start, part.start + part.size)
                    outputs[:, columns].index_add_(0, rows, hidden @ product.up[slot, :rank, columns])
