"""What to compute in the next step, and whose pages make room for it. Knows nothing of tensors or text.

A step is a budget of tokens: first one token for each sequence that decodes, so that nobody's stream waits
longer than one step, then pieces of prompts, oldest request first. When pages run out, the youngest running
sequence gives its pages up and is computed again later; what it has generated stays.

Nobody starves: requests begin in the order of their arrival, none overtakes, and the oldest is never
preempted for another, so it always gets on until it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from .pages import Pages, key
from .sequence import Sequence

#: However little memory there is, a step may compute this many tokens.
_LEAST_BUDGET: Final = 16
#: Good steps after which a budget cut for want of memory doubles again.
_STEPS_TO_RECOVER: Final = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Compute ``sequence.token_ids[computed : computed + tokens]``.

    Attributes:
        samples: the row reaches the sequence's end, so its last logits give the next token.
    """

    sequence: Sequence
    tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step's work: rows that decode, then rows of prompts.

    Attributes:
        begun: sequences that run for the first time.
        preempted: how many had to give their pages up.
    """

    rows: list[Row]
    begun: list[Sequence]
    preempted: int


class Scheduler:
    """Chooses the rows of each step.

    The caller adds sequences, runs what `schedule` returns, calls `computed` for the rows that the model
    has computed, and removes each sequence that ends.

    Args:
        pages: the cache's accounts; only this scheduler changes them.
        slots: sequences that run at a time.
        step_tokens: most tokens of one step.
    """

    def __init__(self, pages: Pages, *, slots: int, step_tokens: int) -> None:
        self.pages = pages
        # Every running sequence can have a token in every step.
        self._most_running = min(slots, step_tokens)
        self._most_tokens = step_tokens
        self._budget = step_tokens
        self._good_steps = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order of their numbers
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, oldest first."""
        yield from self._running
        yield from self._waiting

    @property
    def running(self) -> int:
        """Sequences that own pages."""
        return len(self._running)

    @property
    def budget(self) -> int:
        """Most tokens of the next step."""
        return self._budget

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the cache when it has all of it."""
        return self.pages.needed(tokens) <= self.pages.total

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; the caller has asked `can_ever_fit` for its `most_tokens`."""
        assert self.can_ever_fit(sequence.most_tokens), f"{sequence.most_tokens} tokens never fit"
        self._arrived += 1
        sequence.number = self._arrived
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """A sequence has ended: its pages go back. If `tainted`, nobody will share what is in them."""
        if tainted:
            self.pages.forget(sequence.pages)
        self._release(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(self) -> Step:
        """Choose the rows of the next step, each with pages for its tokens."""
        rows: list[Row] = []
        begun: list[Sequence] = []
        preempted = self._decode(rows)
        # At least a token for prompts, even if the budget was cut below what decodes.
        left = self._continue_prompts(rows, max(1, self._budget - len(rows)))
        if not preempted:
            begun = self._begin(rows, left)
        assert rows or not self, f"{len(self)} sequences, and none of them can run"
        return Step(rows, begun, preempted)

    def computed(self, row: Row) -> None:
        """The model has computed a row: its full pages may be shared from now on."""
        sequence = row.sequence
        before = sequence.computed // self.pages.page_tokens
        sequence.computed += row.tokens
        full = sequence.computed // self.pages.page_tokens
        if full > before and self.pages.caching:
            self._name_pages(sequence, full)
            for page in range(before, full):
                self.pages.publish(sequence.pages[page], sequence.page_keys[page])

    def shrink(self) -> None:
        """A step was too large for the memory: take smaller ones for a while."""
        self._budget = max(_LEAST_BUDGET, self._budget // 2)
        self._good_steps = 0

    def went_well(self) -> None:
        """A step fitted the memory; after many, a budget that was cut grows again."""
        if self._budget == self._most_tokens:
            return
        self._good_steps += 1
        if self._good_steps >= _STEPS_TO_RECOVER:
            self._budget = min(self._most_tokens, self._budget * 2)
            self._good_steps = 0

    def check(self) -> None:
        """Assert that pages and sequences agree; may be called between any two steps.

        Raises:
            AssertionError: with the numbers that disagree.
        """
        self.pages.check(sequence.pages for sequence in self)
        numbers = [sequence.number for sequence in self]
        assert numbers == sorted(set(numbers)), f"out of order of arrival: {numbers}"
        assert self.running <= self._most_running, f"{self.running} run, {self._most_running} may"
        for sequence in self:
            owned, length = len(sequence.pages), len(sequence.token_ids)
            least = self.pages.needed(sequence.computed)
            assert least <= owned <= self.pages.needed(length), (
                f"{sequence.id}: {owned} pages for {sequence.computed} of {length} tokens"
            )
        for sequence in self._waiting:
            assert not sequence.pages, f"{sequence.id} waits and owns {len(sequence.pages)} pages"

    def _decode(self, rows: list[Row]) -> int:
        """One token for each sequence that decodes, oldest first. Returns how many were preempted for it."""
        before = len(self._running)
        at = 0
        # Preemption shortens the list from its end: what is before `at` is there to stay.
        while at < len(self._running):
            sequence = self._running[at]
            at += 1
            if sequence.uncomputed == 1 and self._grow(sequence):
                rows.append(Row(sequence, 1, True))
        return before - len(self._running)

    def _grow(self, sequence: Sequence) -> bool:
        """Give it a page for its last token if it needs one, at the cost of the youngest, maybe its own."""
        if len(sequence.pages) >= self.pages.needed(len(sequence.token_ids)):
            return True
        while not self.pages.can_take(1):
            youngest = self._running.pop()
            self._release(youngest)
            self._waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        sequence.pages += self.pages.take(1)
        return True

    def _continue_prompts(self, rows: list[Row], left: int) -> int:
        """Spend `left` tokens on prompts that have begun. Returns what is left of them."""
        for sequence in self._running:
            if left <= 0:
                break
            if sequence.uncomputed > 1:
                left -= self._add_piece(rows, sequence, left)
        return left

    def _begin(self, rows: list[Row], left: int) -> list[Sequence]:
        """Spend `left` tokens on sequences that wait, in order, while there are slots and pages."""
        begun = []
        coming = self._coming_keys() if self._waiting else set()
        while self._waiting and left > 0 and len(self._running) < self._most_running:
            sequence = self._waiting[0]
            keys = self._sharable_keys(sequence)
            shared = self.pages.find(keys)
            if len(shared) < len(keys) and keys[len(shared)] in coming:
                break  # what it would compute is being computed: next step it finds it done
            new = self.pages.needed(len(sequence.token_ids)) - len(shared)
            # Each running one can then grow by a page before somebody has to be preempted.
            if not self.pages.can_take(new + len(self._running), shared):
                break
            self.pages.share(shared)
            sequence.pages = shared + self.pages.take(new)
            sequence.computed = len(shared) * self.pages.page_tokens
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
                begun.append(sequence)
            self._running.append(self._waiting.popleft())
            coming.update(keys[len(shared) :])
            left -= self._add_piece(rows, sequence, left)
        return begun

    def _add_piece(self, rows: list[Row], sequence: Sequence, left: int) -> int:
        tokens = min(left, sequence.uncomputed)
        rows.append(Row(sequence, tokens, tokens == sequence.uncomputed))
        return tokens

    def _sharable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages that it might share: all full ones, but one token must be left to compute."""
        if not self.pages.caching or sequence.wants_prompt_logits:
            return []
        count = (len(sequence.token_ids) - 1) // self.pages.page_tokens
        self._name_pages(sequence, count)
        return sequence.page_keys[:count]

    def _coming_keys(self) -> set[bytes]:
        """Keys of pages that running sequences have yet to fill."""
        page_tokens = self.pages.page_tokens
        return {
            name
            for sequence in self._running
            if sequence.uncomputed > 1
            for name in islice(sequence.page_keys, sequence.computed // page_tokens, None)
        }

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        page_tokens, keys = self.pages.page_tokens, sequence.page_keys
        for page in range(len(keys), count):
            tokens = sequence.token_ids[page * page_tokens : (page + 1) * page_tokens]
            keys.append(key(keys[-1] if keys else b"", tokens))

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0
