"""Weights that are replaced while an engine runs, and those of one that sleeps.

New weights are read and checked in host memory while the engine computes: safetensors files are mapped, not copied. If
tensors have the names of the model's modules, they are copied into the place of the present ones, each rank its part,
and captured graphs stay as they are. Other checkpoints, as those with a tensor per expert, are loaded as at the start.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.infra.model import weight_files
from penstock.schemas.errors import Code
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.native import host_copies
from penstock.workers.engines.native.executors import PreparedModel, prepared
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.adapters import places_of
from penstock.workers.engines.native.model.attention import UnsupportedAttention
from penstock.workers.engines.native.model.loading import (
    check_files,
    check_values,
    configuration,
    differences,
    named_end_tokens,
)
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.parallel import split
from penstock.workers.engines.native.model.pool import device_errors, dtype_name, out_of_memory
from penstock.workers.engines.native.model.pools import KvPools
from penstock.workers.engines.native.ranks import EngineRanks

if TYPE_CHECKING:
    from penstock.workers.engines.native.executors import AnyExecutor


class ReadWeights(NamedTuple):
    """``values``: by their names in the model; None: the folder is loaded when they are replaced."""

    folder: Path
    values: Mapping[str, Tensor] | None


class WeightReader:
    """Reads folders for a loaded model, or for one rank's part of it.

    Args:
        quantize: what was done to the loaded model's weights; None: nothing.
    Attributes:
        model: as given; it may be replaced by one of the same configuration.
    """

    def __init__(self, model: Model, quantize: Callable[[Any], object] | None = None) -> None:
        self.model, self._quantize = model, quantize
        self._frame: Any = None  # the model without weights, made now: transformers does so by global state
        if model.multimodal or getattr(model.forward.config, "quantization_config", None):
            return
        attention.register()
        try:
            with torch.device("meta"):
                self._frame = AutoModelForCausalLM.from_config(
                    copy.deepcopy(model.forward.config), attn_implementation=attention.NAME, dtype=model.dtype
                )
        except Exception:  # of transformers', of any kind: then folders are loaded whole
            return

    def read(self, folder: Path) -> Mapping[str, Tensor] | None:
        """Its weights, mapped into memory; None: they have other names, or it may be of another model.

        Raises:
            UnsupportedModel: tensors are missing, or have no usable values.
        """
        if self._frame is None or weight_files.key_mapping(folder) or weight_files.is_mistral_format(folder):
            return None
        config = configuration(str(folder))
        if differences(self._frame.config, config) or named_end_tokens(folder, config) != self.model.eos_token_ids:
            return None
        check_files(folder)
        frame = copy.deepcopy(self._frame)
        wanted, found = frame.state_dict(keep_vars=True), dict[str, Tensor]()
        for name, tensor in _tensors(folder).items():
            if name not in wanted or wanted[name].shape != tensor.shape:
                return None
            found[name] = nn.Parameter(tensor.to(wanted[name].dtype), requires_grad=False)
        frame.load_state_dict(found, strict=False, assign=True)
        frame.tie_weights()
        if any(each.is_meta for each in frame.parameters()):
            return None
        check_values(str(folder), dict(frame.named_parameters()))
        if self.model.group is not None:
            split(frame, self.model.group)
        if self._quantize is not None:
            self._quantize(frame)
        values = dict(frame.named_parameters()) | dict(frame.named_buffers())
        values = {name: value for name, value in values.items() if not value.is_meta}  # others follow from the config
        places = places_of(self.model.forward)
        return values if all(_fits(places.get(name), value) for name, value in values.items()) else None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Of all safetensors files; mapped, so that nothing is read yet."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return found


def put(model: Model, values: Mapping[str, Tensor]) -> None:
    """Copy what a ``WeightReader`` of this model has read into its place."""
    places = places_of(model.forward)
    with device_errors(), torch.inference_mode():
        host_copies.copy((places[name], value) for name, value in values.items())
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)


class DeviceWeights:
    """Implements ``core.engine.WeightStore``.

    Args:
        executor: of ``make``.
        load: loads a folder as ``target`` was loaded, onto a device, in a data type; None: no folder is loaded whole.
        make: what computes with a model and ``pools``; with True, as another did before.
        quantize: as of ``WeightReader``.
        stays: why the KV cache or other memory cannot leave the device; "": all of it can.
        ranks: the others, of a model that is split.
    """

    def __init__(
        self,
        target: PreparedModel,
        pools: KvPools,
        executor: "AnyExecutor",
        *,
        load: Callable[[str, torch.device, str], Model] | None,
        make: "Callable[[PreparedModel, bool], AnyExecutor]",
        quantize: Callable[[Any], object] | None = None,
        stays: str = "",
        ranks: EngineRanks | None = None,
    ) -> None:
        self._target = target
        self._executor = executor
        self._pools = [pools.kv, *([pools.sliding.pool] if pools.sliding is not None else [])]
        self._load = load
        self._make = make
        self._reader = WeightReader(target.model, quantize)
        self.stays = stays
        self._ranks = ranks
        self._host: HostCopy | None = None  # of the present weights

    def read(self, folder: Path) -> ReadWeights:
        try:
            values = self._reader.read(folder)
        except (UnsupportedModel, OSError, SafetensorError) as error:
            raise _refused(str(error)) from error
        if values is None and self._load is None:
            raise _refused(
                f"{folder}: tensors have other names or sizes than the modules of "
                f"{type(self._target.model.forward).__name__}, or config.json differs; a model that is split over GPUs "
                "takes those only"
            )
        return ReadWeights(folder, values)

    def replace(self, read: ReadWeights) -> "AnyExecutor | None":
        self._host = None
        if read.values is None:
            return self._load_whole(read.folder)
        if self._ranks is None:
            put(self._target.model, read.values)
            return None
        with self._ranks.explained():
            if reason := self._ranks.read_weights(read.folder):
                raise _refused(reason)
            self._ranks.put_weights()
            put(self._target.model, read.values)
            self._ranks.await_weights()
        return None

    def _load_whole(self, folder: Path) -> "AnyExecutor | None":
        old = self._target.model
        assert self._load is not None
        try:
            new = self._load(str(folder), torch.device("cpu"), dtype_name(old.dtype))
        except (UnsupportedModel, UnsupportedAttention) as error:
            raise _refused(str(error)) from error
        changed = differences(old.forward.config, new.forward.config)
        if changed or old.eos_token_ids != new.eos_token_ids:
            raise _refused(
                f"{folder} is of another model: {', '.join(changed or ['end tokens'])} differ; weights are replaced by "
                "those of the same configuration only"
            )
        places = places_of(old.forward)
        values = dict(new.forward.named_parameters()) | dict(new.forward.named_buffers())
        unfit = [name for name, value in values.items() if not _fits(places.get(name), value)]
        if unfit and self._target.rotation is not None:
            return self._rebuild(new, str(folder))
        if unfit:
            raise _refused(f"{folder}: {unfit[0]} has another size or data type here")
        put(old, values)
        return None

    def _rebuild(self, new: Model, folder: str) -> "AnyExecutor":
        """The kernels keep some weights in a form of their own: prepare the new model as at the start.

        Raises:
            RequestError: this engine's memory cannot be freed meanwhile.
            EngineError: the new model cannot be prepared. The old one is gone.
        """
        old, load = self._target.model, self._load
        assert load is not None
        self._free_pools("weights of this form do not take the place of others; restart this worker with them")
        for each in (*old.forward.parameters(), *old.forward.buffers()):
            each.data = torch.empty(0, dtype=each.dtype)
        try:
            moved = dataclasses.replace(new, forward=new.forward.to(old.device), device=old.device)
            self._target = prepared(moved, lambda: load(folder, old.device, dtype_name(old.dtype)))
        except (torch.OutOfMemoryError, UnsupportedModel) as error:
            raise EngineError(f"the weights of {folder} cannot be prepared: {error}") from error
        self._reader.model = self._target.model
        return self._allocate(again=False)

    def _free_pools(self, consequence: str) -> None:
        if self.stays:
            raise RequestError(Code.unsupported, f"{self.stays} stays on the device, so {consequence}")
        self._executor.close()
        for pool in self._pools:
            pool.free()

    def sleep(self) -> None:
        self._free_pools("this worker does not sleep")
        if self._target.model.device.type == "cuda":
            self._host = self._host or HostCopy(self._target.model.forward)
            self._host.leave()
            torch.cuda.empty_cache()

    def wake(self) -> "AnyExecutor":
        return self._allocate(again=True)

    def _allocate(self, again: bool) -> "AnyExecutor":
        try:
            if self._host is not None:
                self._host.bring(self._target.model.device)
            for pool in self._pools:
                pool.allocate()
            self._executor = self._make(self._target, again)
        except (torch.OutOfMemoryError, OSError) as error:
            raise EngineError(out_of_memory(error)) from error
        return self._executor


class HostCopy:
    """A model's tensors in host memory. Kept while it is awake: weights do not change, so it leaves at once again.

    Args:
        model: whose tensors are copied now. Those that share memory, as tied weights, still do.
    """

    def __init__(self, model: Any) -> None:
        self._shared: dict[int, tuple[Tensor, list[Tensor]]] = {}  # bytes in host memory, and what is within them
        pairs = []
        for each in (*model.parameters(), *model.buffers()):
            storage = each.data.untyped_storage()
            if storage.data_ptr() not in self._shared:
                source = torch.empty(0, dtype=torch.uint8, device=each.device).set_(storage)
                target = torch.empty(storage.nbytes(), dtype=torch.uint8)
                self._shared[storage.data_ptr()] = target, []
                pairs.append((target, source))
            self._shared[storage.data_ptr()][1].append(each)
        host_copies.copy(pairs)

    def leave(self) -> None:
        """Have the model's tensors in host memory only."""
        for held, tensors in self._shared.values():
            _set(tensors, held)

    def bring(self, device: torch.device) -> None:
        """Copy them to a device."""
        pairs = [(torch.empty_like(held, device=device), held) for held, _ in self._shared.values()]
        host_copies.copy(pairs)
        for (placed, _), (_, tensors) in zip(pairs, self._shared.values(), strict=True):
            _set(tensors, placed)


def _set(tensors: list[Tensor], memory: Tensor) -> None:
    for each in tensors:
        empty = torch.empty(0, dtype=each.dtype, device=memory.device)
        each.data = empty.set_(memory.untyped_storage(), each.storage_offset(), each.shape, each.stride())


def _fits(place: Any, value: Tensor) -> bool:
    return place is not None and place.shape == value.shape and place.dtype == value.dtype


def _refused(reason: str) -> RequestError:
    return RequestError(Code.invalid_request, reason)
