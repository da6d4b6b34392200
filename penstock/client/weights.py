"""Sends a trainer's tensors to a deployment, whose workers compute with them from then on.

    from penstock.client.weights import send_weights

    send_weights("http://gateway:8000", model.state_dict(), api_key=KEY, backend="nccl")

Workers receive them beside the weights that they serve, so a trainer that fails changes nothing. It is rank 0 of a
process group of its own, made for each call; other groups of its process are left alone. Over NIXL the workers read its
memory, and it only waits. This module imports nothing of the server.
"""

import base64
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor, distributed

from .answers import PenstockError, error

BUCKET_BYTES = 256 << 20
JOIN_S = 60.0  # for all workers to join
QUIET_S = 60.0  # for them to take one bucket; over NIXL, to read everything
WHOLE_S = 3600.0
POLL_S = 0.0005
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def send_weights(
    url: str,
    tensors: Mapping[str, Tensor],
    *,
    api_key: str = "",
    model: str = "",
    backend: Literal["nccl", "gloo", "nixl"] = "nccl",
    address: str = "",
    running: Literal["finish", "continue"] = "finish",
    timeout_s: float = 120.0,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Any]:
    """Replace the weights of a model in all its workers; returns when they compute with them.

    Args:
        url: of a gateway.
        tensors: all weights of the model, by the names of its ``state_dict`` or of its checkpoint.
        api_key: of an operator.
        model: which one, where several are served.
        backend: ``nccl`` from GPU to GPU, never within one; ``gloo`` through host memory; ``nixl``: workers read.
        address: under which workers reach this process; default: the one that reaches the gateway.
        running: whether running requests end first or continue with the new weights.
        timeout_s: seconds for running requests to finish.
        dtype: floating-point tensors are converted to it; None: sent as they are.
        bucket_bytes: of a broadcast; as much memory is needed on the device, and on that of each worker.
    Returns: the answer of ``POST /v1/admin/update_weights``.
    Raises:
        PenstockError: the weights before are still served; the text says why.
    """
    gateway = urlsplit(url)
    address = address or _own_address(gateway.hostname or "", gateway.port or 80)
    sent = {
        name: dtype if dtype is not None and each.is_floating_point() else each.dtype for name, each in tensors.items()
    }
    header, total = _header(tensors, sent)
    library: Any = distributed  # its stores are not typed
    store = library.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S))
    with contextlib.ExitStack() as kept:
        store.set("header", header)
        store.set("bucket", str(bucket_bytes))
        if backend == "nixl":
            place = kept.enter_context(_Placed(tensors, sent))
            store.set("nixl", place.described)
        asked = {
            "from": backend, "address": address, "port": store.port, "model": model, "running": running,
            "timeout_s": timeout_s,
        }  # fmt: skip
        call = _Call(f"{url.rstrip('/')}/v1/admin/update_weights", api_key, asked, timeout_s)
        size = _joined(store, call)
        store.set("go", "")
        if backend == "nixl":
            waited = QUIET_S + total / (1 << 30)
            call.wait(lambda: store.check([f"received/{rank}" for rank in range(1, size)]), waited, "workers to read")
        else:
            _broadcast(tensors, sent, total, bucket_bytes, backend, address, store, size, call)
        return call.answer(timeout_s + WHOLE_S)


class _Call:
    """The request to the gateway, in a thread of its own."""

    def __init__(self, url: str, key: str, body: dict[str, Any], timeout_s: float) -> None:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        self._timeout_s = timeout_s + WHOLE_S
        self._found: dict[str, Any] | PenstockError | None = None
        self._thread = threading.Thread(target=self._ask, name="update-weights", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            # No proxy (HTTP_PROXY) reaches a gateway of this machine.
            here = urlsplit(self._request.full_url).hostname in ("127.0.0.1", "localhost", "::1")
            opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))
            with opener.open(self._request, timeout=self._timeout_s) as answer:
                self._found = json.load(answer)
        except urllib.error.HTTPError as refused:
            try:
                said = json.load(refused)["error"]
                self._found = error(str(said.get("code") or ""), str(said["message"]))
            except (ValueError, KeyError, TypeError):
                self._found = error("", f"the gateway answers with status {refused.code}")
        except (OSError, ValueError) as problem:
            self._found = error("", f"the gateway does not answer: {problem}")

    def check(self) -> None:
        """Raise what the gateway has answered, if it is an error."""
        if isinstance(self._found, PenstockError):
            raise self._found

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() > until:
                raise error("timeout", f"waited {seconds:g} s for {what}")
            time.sleep(POLL_S)

    def answer(self, seconds: float) -> dict[str, Any]:
        self._thread.join(seconds)
        self.check()
        if not isinstance(self._found, dict):
            raise error("timeout", f"the gateway did not answer within {seconds:g} s")
        return self._found


def _joined(store: Any, call: _Call) -> int:
    """How many there are with this process, once all are there."""
    call.wait(lambda: store.check(["world"]), JOIN_S, "workers to join")
    size = int(store.get("world"))
    call.wait(lambda: store.check([f"joined/{rank}" for rank in range(1, size)]), JOIN_S, f"{size - 1} workers to join")
    return size


def _header(tensors: Mapping[str, Tensor], sent: Mapping[str, torch.dtype]) -> tuple[bytes, int]:
    """Of a safetensors file, with its length in front; and the bytes of all tensors."""
    described, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * sent[name].itemsize
        if sent[name] not in _NAMES:
            raise error("invalid_request", f"{name} is of type {sent[name]}, which cannot be sent; give a dtype")
        described[name] = {"dtype": _NAMES[sent[name]], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text, end


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8)


def _broadcast(
    tensors: Mapping[str, Tensor],
    sent: Mapping[str, torch.dtype],
    total: int,
    bucket_bytes: int,
    backend: str,
    address: str,
    store: Any,
    size: int,
    call: _Call,
) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = next((each.device for each in tensors.values() if each.is_cuda), torch.device("cuda"))
    group = _group(backend, address, store, size)
    buffer, filled = torch.empty(min(bucket_bytes, total), dtype=torch.uint8, device=device), 0

    def flush() -> None:
        work = group.broadcast(buffer[:filled], 0)
        call.wait(work.is_completed, QUIET_S, "workers to take a bucket")
        work.wait()

    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for name, tensor in tensors.items():
                part = _bytes(tensor, sent[name])
                while len(part):
                    count = min(len(part), len(buffer) - filled)
                    buffer[filled : filled + count].copy_(part[:count])
                    part, filled = part[count:], filled + count
                    if filled == len(buffer):
                        flush()
                        filled = 0
            if filled:
                flush()
    except RuntimeError as problem:
        call.check()
        raise error("", f"the workers cannot be reached over {backend}: {problem}") from problem
    finally:
        if backend == "nccl":
            group.abort()


def _group(backend: str, address: str, store: Any, size: int) -> Any:
    library: Any = distributed
    prefixed = library.PrefixStore("group", store)
    if backend == "nccl":
        options = library.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WHOLE_S)
        return library.ProcessGroupNCCL(prefixed, 0, size, options)
    options = library.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=QUIET_S)
    options._devices = [library.ProcessGroupGloo.create_device(hostname=address)]
    return library.ProcessGroupGloo(prefixed, 0, size, options)


class _Placed:
    """Tensors that NIXL's agent has registered, so that others can read them. As a context."""

    def __init__(self, tensors: Mapping[str, Tensor], sent: Mapping[str, torch.dtype]) -> None:
        agent = _nixl_agent()
        self._kept = [each for name, tensor in tensors.items() if len(each := _bytes(tensor, sent[name]))]
        kinds = {each.device.type for each in self._kept}
        if len(kinds) != 1:
            raise error("invalid_request", f"over NIXL all tensors are in one kind of memory, not in {sorted(kinds)}")
        ranges = [(each.data_ptr(), len(each), each.device.index or 0) for each in self._kept]
        self._agent = agent
        kind = "VRAM" if kinds == {"cuda"} else "DRAM"
        if kind == "VRAM":
            torch.cuda.synchronize()
        once = [(*each, "") for each in dict.fromkeys(ranges)]  # tied ones twice would crash when they are given back
        self._registered = agent.register_memory(once, mem_type=kind)
        self.described = json.dumps(
            {
                "agent": agent.name,
                "metadata": base64.b64encode(agent.get_agent_metadata()).decode(),
                "kind": kinds.pop(),
                "ranges": ranges,
            }
        )

    def __enter__(self) -> "_Placed":
        return self

    def __exit__(self, *_: object) -> None:
        self._agent.deregister_memory(self._registered)


def _nixl_agent() -> Any:
    for name in ("nixl_cu12", "nixl_cu13"):
        with contextlib.suppress(ImportError):
            api = __import__(f"{name}._api", fromlist=["nixl_agent"])
            return api.nixl_agent(f"trainer-{uuid4().hex}", api.nixl_agent_config(enable_prog_thread=True))
    raise error("unsupported", "install NIXL: pip install nixl-cu12, or nixl-cu13 with CUDA 13")


def _own_address(host: str, port: int) -> str:
    """The address of this machine that reaches a host."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as way:
        way.connect(family[4])  # sends nothing
        return str(way.getsockname()[0])
