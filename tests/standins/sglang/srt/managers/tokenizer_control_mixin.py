"""As ``sglang.srt.managers.tokenizer_control_mixin``: what is asked of all schedulers."""

import asyncio
import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.load_snapshot import LoadSnapshot
from tensorrt_llm._standin.model import lora_logits


class TokenizerControlMixin:
    schedulers: list[Any]
    server_args: Any

    def init_lora(self) -> None:
        self.lora_update_lock = asyncio.Lock()
        self.lora_registry: dict[str, str] = {}  # id by name
        self.lora_ref_cache: dict[str, str] = {}  # path by name, of all that were ever loaded
        self.lora_users: dict[str, int] = {}  # by id
        self.lora_ended = asyncio.Event()

    async def load_lora_adapter(self, obj: Any, _: Any = None) -> SimpleNamespace:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        args = self.server_args
        if not args.enable_lora:
            return SimpleNamespace(success=False, error_message="LoRA is not enabled. Please set `--enable-lora`")
        assert args.dp_size == 1, "data-parallel replicas are not supported for dynamic lora loading"
        async with self.lora_update_lock:
            identity = uuid.uuid4().hex
            try:
                folder = Path(obj.lora_path)
                config = json.loads((folder / "adapter_config.json").read_text())
                if args.attn_dp_size > 1 and not obj.pinned:
                    raise ValueError("DP-attention LoRA requires pinned adapters")
                if obj.lora_name in self.lora_registry:
                    raise ValueError(f"Failed to load LoRA adapter {obj.lora_name} because it is already loaded")
                if config["r"] > args.max_lora_rank or set(config["target_modules"]) - set(args.lora_target_modules):
                    raise ValueError(f"LoRA adapter {obj.lora_name} with rank {config['r']} is incompatible with the")
                logits = lora_logits(folder, self.schedulers[0].model.vocab)
            except (OSError, ValueError) as error:
                return SimpleNamespace(success=False, error_message=str(error))
            for each in self.schedulers:
                each.loras[identity] = logits
                each.pool.lora_names[identity] = obj.lora_name
            self.lora_registry[obj.lora_name], self.lora_users[identity] = identity, 0
            self.lora_ref_cache[obj.lora_name] = obj.lora_path
            return SimpleNamespace(success=True, error_message="")

    async def unload_lora_adapter(self, obj: Any, _: Any = None) -> SimpleNamespace:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        async with self.lora_update_lock:  # which nothing is loaded meanwhile
            identity = self.lora_registry.pop(obj.lora_name, None)
            if identity is None:
                return SimpleNamespace(success=False, error_message=f"LoRA with name {obj.lora_name} does not exist")
            while self.lora_users[identity]:
                self.lora_ended.clear()
                await self.lora_ended.wait()
            del self.lora_users[identity]
            for each in self.schedulers:
                del each.loras[identity]
            return SimpleNamespace(success=True, error_message="")

    async def _at_all(self, what: Any) -> Any:
        """What a scheduler answers; one that fails ends its process, and whoever waits for it is left waiting."""
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        (scheduler,) = self.schedulers
        try:
            return what(scheduler)
        except Exception:
            scheduler.process.kill()
            return await asyncio.get_running_loop().create_future()

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        await self._at_all(lambda each: each.release())

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        await self._at_all(lambda each: each.resume())

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[LoadSnapshot]:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        return [each.load() for each in self.schedulers if dp_rank in (None, each.rank)]

    async def flush_cache(self, timeout_s: float | None = None) -> SimpleNamespace:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        done = [each.flush() for each in self.schedulers]
        return SimpleNamespace(success=all(done))
