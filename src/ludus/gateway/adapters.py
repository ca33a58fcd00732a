"""LoRA adapters of a served engine by client-visible name.

Adapters are read from folders in PEFT's format. A running request keeps its adapter: an unloaded adapter
disappears from the list at once and leaves the engine when unused. Engine names are never reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.lora_files import read_adapter
from ludus.errors import SyncError, UserError
from ludus.gateway.protocol.requests import BadRequest

_NOT_FOUND = 404


@dataclass(eq=False)
class GatewayAdapter:
    """One adapter: `key` is its name in the engine, `users` counts running requests."""

    name: str
    key: str
    root: str
    version: int
    users: int = 0
    is_leaving: bool = False


@dataclass
class AdapterTable:
    """The loaded adapters."""

    engine: LocalEngine
    _by_name: dict[str, GatewayAdapter] = field(default_factory=dict)
    _num_loaded: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def listed(self) -> tuple[GatewayAdapter, ...]:
        """Adapters that requests may name, oldest first."""
        return tuple(self._by_name.values())

    def find(self, name: str) -> GatewayAdapter | None:
        """Return the adapter with that name, or None."""
        return self._by_name.get(name)

    async def load(self, name: str, root: str, version: int | None, *, in_place: bool) -> None:
        """Load an adapter from a folder; with `in_place` replace a loaded one of that name.

        `version` None counts up from 0. Raises BadRequest, without changes, if it cannot be loaded.
        """
        async with self._lock:
            known = self._by_name.get(name)
            if known is not None and not in_place:
                raise BadRequest(f"The adapter {name!r} is already loaded; set load_inplace to replace it.")
            if version is None:
                version = 0 if known is None else known.version + 1
            self._num_loaded += known is None
            key = f"{name}#{self._num_loaded}" if known is None else known.key
            try:
                files = await asyncio.to_thread(read_adapter, Path(root))
                await self.engine.load_adapter(key, version, files.state, files.scaling)
            except (UserError, SyncError) as error:
                raise BadRequest(str(error)) from error
            if known is None:
                self._by_name[name] = GatewayAdapter(name, key, root, version)
            else:
                known.root, known.version = root, version

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises BadRequest if the name is unknown."""
        async with self._lock:
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                raise BadRequest(f"Adapter {name!r} is not loaded.", _NOT_FOUND)
            adapter.is_leaving = True
            if not adapter.users:
                await self.engine.unload_adapter(adapter.key)

    @contextmanager
    def using(self, adapter: GatewayAdapter | None) -> Iterator[str | None]:
        """Hold an adapter during the block; yield its name in the engine."""
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter.key
        finally:
            adapter.users -= 1
            if adapter.is_leaving and not adapter.users:
                task = asyncio.get_running_loop().create_task(self.engine.unload_adapter(adapter.key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
