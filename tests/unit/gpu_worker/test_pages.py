"""The page accounts: states, counts, keys, eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.pages import Pages, key


def chain(*blocks: list[int]) -> list[bytes]:
    """Keys of full pages with these tokens."""
    keys: list[bytes] = []
    for block in blocks:
        keys.append(key(keys[-1] if keys else b"", block))
    return keys


def cached(pages: Pages, keys: list[bytes]) -> list[int]:
    """Pages that were computed under these keys and let go."""
    taken = pages.take(len(keys))
    for page, name in zip(taken, keys, strict=True):
        pages.publish(page, name)
    pages.release(taken)
    return taken


def test_all_pages_are_there_at_first() -> None:
    pages = Pages(3, 4)
    assert (pages.available, pages.used) == (3, 0)
    pages.check([])


def test_a_taken_page_is_used_and_a_released_one_is_not() -> None:
    pages = Pages(3, 4)
    taken = pages.take(2)
    assert pages.used == 2 and len(set(taken)) == 2
    pages.check([taken])
    pages.release(taken)
    assert pages.used == 0
    pages.check([])


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_needed_counts_begun_pages(tokens: int, count: int) -> None:
    assert Pages(3, 4).needed(tokens) == count


def test_a_key_depends_on_everything_before_the_page() -> None:
    assert key(b"", [1, 2]) == key(b"", [1, 2])
    assert key(b"", [1, 2]) != key(b"", [2, 1])
    assert chain([1, 2], [3, 4])[1] != chain([1, 9], [3, 4])[1]


def test_a_published_page_is_found_again_after_its_release() -> None:
    pages = Pages(4, 2)
    keys = chain([1, 2], [3, 4])
    taken = cached(pages, keys)
    assert pages.find(keys) == taken
    assert pages.find([*keys, key(keys[-1], [5, 6])]) == taken
    assert pages.find(chain([1, 2], [3, 5])) == taken[:1]
    assert pages.find(chain([9, 9])) == []


def test_a_shared_page_is_free_only_after_its_last_owner() -> None:
    pages = Pages(2, 2)
    keys = chain([1, 2])
    (page,) = cached(pages, keys)
    pages.share([page])
    pages.share([page])
    pages.check([[page], [page]])
    pages.release([page])
    assert pages.used == 1
    pages.release([page])
    assert pages.used == 0 and pages.find(keys) == [page]


def test_idle_pages_are_evicted_least_recently_used_first() -> None:
    pages = Pages(2, 2)
    old, new = chain([1, 1]), chain([2, 2])
    (first,) = cached(pages, old)
    (second,) = cached(pages, new)
    pages.share([first])
    pages.release([first])  # now `second` is the least recently used
    assert pages.take(1) == [second]
    assert pages.find(new) == [] and pages.find(old) == [first]


def test_of_one_sequence_the_end_is_evicted_before_the_beginning() -> None:
    pages = Pages(2, 2)
    keys = chain([1, 1], [2, 2])
    first, second = cached(pages, keys)
    assert pages.take(1) == [second]
    assert pages.find(keys) == [first]


def test_can_take_does_not_count_pages_that_are_about_to_be_shared() -> None:
    pages = Pages(2, 2)
    (page,) = cached(pages, chain([1, 1]))
    assert pages.can_take(2)
    assert pages.can_take(1, [page])
    assert not pages.can_take(2, [page])


def test_the_second_page_with_the_same_content_stays_private() -> None:
    pages = Pages(2, 2)
    (name,) = chain([1, 1])
    first, second = pages.take(2)
    pages.publish(first, name)
    pages.publish(second, name)
    pages.release([first, second])
    assert pages.find([name]) == [first]
    pages.check([])


def test_a_forgotten_page_is_not_found_and_can_be_used_again() -> None:
    pages = Pages(2, 2)
    keys = chain([1, 1], [2, 2])
    taken = cached(pages, keys)
    pages.share(taken[:1])
    pages.forget(taken)
    assert pages.find(keys) == []
    pages.check([taken[:1]])
    pages.release(taken[:1])
    assert pages.available == 2


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pages = Pages(2, 2, prefix_cache=False)
    keys = chain([1, 1])
    cached(pages, keys)
    assert pages.find(keys) == []
    pages.check([])


def test_check_names_the_numbers_that_disagree() -> None:
    pages = Pages(3, 2)
    taken = pages.take(1)
    with pytest.raises(AssertionError, match="page 0: 1 owners noted, 0 there"):
        pages.check([])
    with pytest.raises(AssertionError, match="page 0: 1 owners noted, 2 there"):
        pages.check([taken, taken])


def test_too_many_releases_are_noticed() -> None:
    pages = Pages(1, 2)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(taken)


class PagesMachine(RuleBasedStateMachine):
    """Any order of sharing, taking, publishing and releasing keeps the accounts right."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(6, 2)
        self.held: list[list[int]] = []
        self.truth: dict[int, bytes] = {}  # what was last published into a page

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if self.pages.can_take(count):
            taken = self.pages.take(count)
            for page in taken:
                self.truth.pop(page, None)
            self.held.append(taken)

    @rule(blocks=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def share(self, blocks: list[int]) -> None:
        keys = chain(*([block, block] for block in blocks))
        found = self.pages.find(keys)
        assert [self.truth[page] for page in found] == keys[: len(found)]
        self.pages.share(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), blocks=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def publish(self, data: st.DataObject, blocks: list[int]) -> None:
        owned = data.draw(st.sampled_from(self.held))
        for page, name in zip(owned, chain(*([block, block] for block in blocks)), strict=False):
            if page not in self.truth:
                self.pages.publish(page, name)
                if self.pages.find([name]) == [page]:
                    self.truth[page] = name

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        owned = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if forget:
            self.pages.forget(owned)
        self.pages.release(owned)

    @invariant()
    def accounts_are_right(self) -> None:
        self.pages.check(self.held)


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_keeps_the_accounts_right = PagesMachine.TestCase
