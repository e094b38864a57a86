"""Who owns which page of the KV cache, and which full pages can be used again. Knows nothing of tensors.

A page is in exactly one of three states:

    free    nobody owns it and nothing in it is of use
    idle    nobody owns it, but its content has a key and may be shared: evicted least recently used first
    owned   one or more sequences hold it; a full one may have a key as well

Only full pages get a key. It is chained over all tokens up to the page's end, so equal keys mean equal
keys and values.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

_KEY_BYTES: Final = 16


def key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full page by its content: that of the page before it (b"" at first) and its tokens.

    A cryptographic hash, because callers choose the tokens, and a collision would show one caller's prompt
    to another.
    """
    return blake2b(before + array("i", token_ids).tobytes(), digest_size=_KEY_BYTES).digest()


class Pages:
    """The page table's accounts: reference counts, keys, and the order of eviction.

    Args:
        total: pages that there are, numbered from 0.
        page_tokens: tokens in one page.
        prefix_cache: keep pages that nobody owns, and find them again.
    """

    def __init__(self, total: int, page_tokens: int, *, prefix_cache: bool = True) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.caching = prefix_cache
        self._owners = [0] * total
        self._free: deque[int] = deque(range(total))
        self._idle: dict[int, None] = {}  # oldest first
        self._page_by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can give, evicting idle ones if it must."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some sequence owns."""
        return self.total - self.available

    def needed(self, tokens: int) -> int:
        """How many pages so many tokens fill or begin."""
        return -(-tokens // self.page_tokens)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages that hold the longest known beginning of `keys`, in order. Changes nothing."""
        found = []
        for name in keys:
            page = self._page_by_key.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def can_take(self, count: int, sharing: Sequence[int] = ()) -> bool:
        """Whether `count` new pages are there once the pages `sharing` are shared."""
        idle = sum(1 for page in sharing if page in self._idle)
        return count <= self.available - idle

    def share(self, pages: Sequence[int]) -> None:
        """Own pages that `find` found, together with whoever owns them already."""
        for page in pages:
            assert page in self._key_of, f"page {page} has no key, so nobody may share it"
            self._idle.pop(page, None)
            self._owners[page] += 1

    def take(self, count: int) -> list[int]:
        """Own `count` new pages; the caller has asked `can_take`."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        taken = []
        for _ in range(count):
            page = self._free.popleft() if self._free else self._evict()
            self._owners[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Disown a sequence's pages. The last ones will be evicted first: beginnings are shared more."""
        for page in reversed(pages):
            self._owners[page] -= 1
            assert self._owners[page] >= 0, f"page {page} was released more often than owned"
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, name: bytes) -> None:
        """An owned page is full and computed: others may share it under this key.

        If another page has the key already, this one stays private.
        """
        assert self._owners[page], f"page {page} has no owner"
        if self.caching and name not in self._page_by_key and page not in self._key_of:
            self._page_by_key[name] = page
            self._key_of[page] = name

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody is to find these pages any more: what is in them can't be trusted."""
        for page in pages:
            name = self._key_of.pop(page, None)
            if name is None:
                continue
            del self._page_by_key[name]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self.forget(list(self._key_of))

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that every page is free, idle or owned, and that all counts are right.

        Args:
            owned: the pages of each sequence.

        Raises:
            AssertionError: with the numbers that disagree.
        """
        counted = Counter(page for pages in owned for page in pages)
        for page, owners in enumerate(self._owners):
            assert owners == counted[page], f"page {page}: {owners} owners noted, {counted[page]} there"
        assert counted.keys() <= set(range(self.total)), f"pages {sorted(counted)} of {self.total}"
        free, idle, held = set(self._free), set(self._idle), set(counted)
        assert len(free) == len(self._free), f"{len(self._free) - len(free)} pages are free twice"
        assert not (free & idle or free & held or idle & held), (
            f"free and idle {free & idle}, free and owned {free & held}, idle and owned {idle & held}"
        )
        assert len(free) + len(idle) + len(held) == self.total, (
            f"{len(free)} free + {len(idle)} idle + {len(held)} owned pages are not {self.total}"
        )
        assert self._page_by_key == {name: page for page, name in self._key_of.items()}, (
            f"{len(self._page_by_key)} keys lead to pages, {len(self._key_of)} pages have keys"
        )
        assert idle <= self._key_of.keys(), f"idle pages without a key: {idle - self._key_of.keys()}"
        assert not free & self._key_of.keys(), f"free pages with a key: {free & self._key_of.keys()}"

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_by_key[self._key_of.pop(page)]
        return page
