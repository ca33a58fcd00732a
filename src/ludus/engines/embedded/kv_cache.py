"""Paged KV cache: page memory, and a radix tree of pages shared between sequences with a common prefix.

A node of the tree is one page; the path from the root to it is a prefix. Running sequences reference their path;
other pages stay cached until memory runs out and are evicted least recently used first. A page is written from left to
right, so its prefix may be read while its owner extends it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ludus.engines.base import common_prefix

PAGE = 16
"""Tokens of one page; must equal PAGE of the compiled kernel."""
_SEPARATOR = "@"


def root_name(adapter: str, version: int) -> str:
    """Return the name of the root of an adapter's version."""
    return f"{adapter}{_SEPARATOR}{version}"


def adapter_of(root: str) -> str:
    """Return the adapter of a root's name."""
    return root.partition(_SEPARATOR)[0]


@dataclass(slots=True, eq=False)
class RadixNode:
    """One page, referenced by `refs` running sequences. `tokens` can be matched by others once `ready`; a node that is
    not `listed` is private to its owner."""

    page: int
    tokens: tuple[int, ...]
    parent: RadixNode | None
    ready: bool = False
    refs: int = 1
    listed: bool = False
    used: int = 0
    children: dict[tuple[int, ...], RadixNode] = field(default_factory=dict)


@dataclass(slots=True)
class CacheMatch:
    """Cached part of a history: whole pages, then `num_copied` tokens of `source` (moved if `owned`). `wait`: another
    sequence is computing more of it now."""

    nodes: list[RadixNode]
    source: RadixNode | None = None
    num_copied: int = 0
    owned: bool = False
    wait: bool = False

    @property
    def num_tokens(self) -> int:
        return PAGE * len(self.nodes) + self.num_copied


class RadixCache:
    """Allocator of the pages 0 to `num_pages - 1`, with lookup by prefix."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._roots: dict[str, RadixNode] = {}
        self._idle: dict[RadixNode, None] = {}
        self._clock = 0

    @property
    def num_available(self) -> int:
        """Number of pages that are free or can be evicted."""
        return len(self._free) + len(self._idle)

    def root(self, adapter: str) -> RadixNode:
        """Return the root of the prefixes computed with this adapter (or a version of it)."""
        return self._roots.setdefault(adapter, RadixNode(-1, (), None, ready=True, listed=True))

    def match(self, tokens: tuple[int, ...], adapter: str = "") -> CacheMatch:
        """Return the longest cached prefix, excluding the last token, whose logits are needed."""
        limit = len(tokens) - 1
        node, at, found = self.root(adapter), 0, CacheMatch([])
        while at + PAGE <= limit:
            child = node.children.get(tokens[at : at + PAGE])
            if child is None:
                break
            if not child.ready:
                found.wait = True
                return found
            found.nodes.append(child)
            node, at = child, at + PAGE
        rest = tokens[at : min(at + PAGE, limit)]
        for child in node.children.values():
            shared = common_prefix(child.tokens, rest)
            if shared > found.num_copied:
                found.source, found.num_copied = child, shared
        source = found.source
        if source is not None:
            found.wait = not source.ready
            whole = found.num_copied == len(source.tokens) < PAGE
            found.owned = whole and source.refs == 0
        return found

    def acquire(self, match: CacheMatch) -> list[RadixNode]:
        """Reference the pages of a match and return the path so far. The caller copies `source`."""
        path = [*match.nodes, match.source] if match.owned and match.source is not None else match.nodes
        for node in path:
            if node.refs == 0:
                self._idle.pop(node)
            node.refs += 1
        return list(path)

    def allocate(self, path: list[RadixNode], tokens: tuple[int, ...], *, listed: bool, adapter: str = "") -> RadixNode:
        """Append a page to a path, shared under `tokens` if `listed`. Raises IndexError if no page is left."""
        if not self._free:
            self._evict()
        parent = path[-1] if path else self.root(adapter)
        node = RadixNode(self._free.pop(), tokens, parent)
        if listed and parent.listed and len(parent.tokens) in (0, PAGE) and tokens not in parent.children:
            parent.children[tokens] = node
            node.listed = True
        path.append(node)
        return node

    def commit(self, path: list[RadixNode], place: int, tokens: tuple[int, ...]) -> None:
        """Mark `tokens` of a path's page as computed and shared; a full page is replaced by its duplicate, if any."""
        node = path[place]
        parent = path[place - 1] if place else node.parent
        if parent is None or not parent.listed or node.children:
            node.ready = node.ready or node.tokens == tokens
            return
        existing = parent.children.get(tokens)
        if existing is node:
            node.ready = True
            return
        if existing is None:
            self._unlist(node)
            node.tokens, node.parent, node.ready, node.listed = tokens, parent, True, True
            parent.children[tokens] = node
        elif len(tokens) == PAGE and existing.ready and node.refs == 1:
            self._unlist(node)
            self._free.append(node.page)
            if existing.refs == 0:
                self._idle.pop(existing)
            existing.refs += 1
            path[place] = existing

    def release(self, path: list[RadixNode]) -> None:
        """Release a path; shared pages stay cached until evicted."""
        self._clock += 1
        for node in reversed(path):
            node.refs -= 1
            node.used = self._clock
            if node.refs:
                continue
            if node.listed and node.ready:
                self._idle[node] = None
            else:
                self._free_page(node)

    def free_suffix(self, tokens: tuple[int, ...], adapter: str = "") -> None:
        """Free the end of a finished episode's history unless other sequences use it."""
        node, at = self.root(adapter), 0
        while at < len(tokens):
            rest = tokens[at : at + PAGE]
            child = node.children.get(rest)
            if child is None:
                partial = [c for c in node.children.values() if len(c.tokens) == common_prefix(c.tokens, rest)]
                child = max(partial, key=lambda c: len(c.tokens), default=None)
            if child is None:
                break
            node, at = child, at + len(child.tokens)
        while node.parent is not None and node.refs == 0 and not node.children:
            above = node.parent
            self._idle.pop(node, None)
            self._free_page(node)
            node = above

    def clear(self, adapter: str | None = None) -> None:
        """Unlist the entries of one adapter, or all; running sequences keep their pages."""
        roots = self._root_names(adapter)
        stack = [node for name in roots for node in self.root(name).children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.listed = node.ready = False
            node.children = {}
            if node.refs == 0:
                self._idle.pop(node, None)
                self._free.append(node.page)
        for name in roots:
            self.root(name).children = {}

    def drop_adapter(self, adapter: str) -> None:
        self.clear(adapter)
        for name in self._root_names(adapter):
            del self._roots[name]

    def drop_empty_roots(self) -> None:
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def _root_names(self, adapter: str | None) -> list[str]:
        return [name for name in self._roots if adapter in (None, name, adapter_of(name))]

    def _evict(self) -> None:
        """Evict the least recently used eighth of the unreferenced pages, leaves first."""
        ordered = sorted(self._idle, key=lambda n: n.used)
        count = max(1, len(ordered) // 8)
        while count and ordered:
            remaining = []
            for node in ordered:
                if count and not node.children:
                    self._idle.pop(node)
                    self._free_page(node)
                    self.num_evicted += 1
                    count -= 1
                else:
                    remaining.append(node)
            if len(remaining) == len(ordered):
                return
            ordered = remaining

    def _free_page(self, node: RadixNode) -> None:
        self._unlist(node)
        self._free.append(node.page)

    @staticmethod
    def _unlist(node: RadixNode) -> None:
        if node.listed and node.parent is not None:
            del node.parent.children[node.tokens]
            node.listed = False


_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Number of key heads, width of a key and of a value."""

    heads: int
    key_width: int
    value_width: int


@dataclass(eq=False)
class PagePool:
    """Keys and values per layer, `[pages, heads, PAGE, width]`; `transposed`: keys `[pages, heads, width, PAGE]`.

    `padding`: one more page, number `num_pages`. `generation` counts the allocations of the memory.
    """

    layers: list[LayerShape]
    num_pages: int
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    padding: bool = False
    generation: int = field(default=0, init=False)
    keys: list[Tensor] = field(default_factory=list, init=False)
    values: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        self.generation += 1
        self.keys, self.values = [], []
        for shape in self.layers:
            pages = (self.num_pages + self.padding, shape.heads)
            key = (shape.key_width, PAGE) if self.transposed else (PAGE, shape.key_width)
            self.keys.append(lazy_zeros((*pages, *key), self.dtype, self.device))
            self.values.append(lazy_zeros((*pages, PAGE, shape.value_width), self.dtype, self.device))

    def free(self) -> None:
        """Free all memory and its contents; on a GPU also for other processes."""
        self.keys, self.values = [], []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy(self, source: int, target: int) -> None:
        for memory in (*self.keys, *self.values):
            memory[target] = memory[source]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that use no CPU memory until written (numpy maps them lazily)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + _CACHE_LINE_BYTES, dtype=np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(shape)
