"""Tokens → text that may leave the worker. Knows nothing of requests, batches or the wire.

Decodes a small window of tokens at a time: what a token adds is the difference between the window's text
with and without it, so that spaces which a decoder drops at the beginning of a text stay where they belong,
and the work for a token doesn't grow with the length of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

HALF: Final = "\N{REPLACEMENT CHARACTER}"
#: Invalid bytes in a row after which the window moves on although its end may be half a character.
LONGEST_CHARACTER: Final = 16


class TextStream:
    """Incremental text of one output.

    The pieces that `push` and `finish` return, joined, are the text of all tokens up to the first stop
    string. No piece ends in half a character, and none holds any part of a stop string (but the whole of
    it, with `include_stop`).

    Args:
        tokenizer: a fast tokenizer; used in the calling thread only.
        stop: strings that end the output; of two that match, the one that begins first counts.
        include_stop: let the matched stop string leave too.
        skip_special_tokens: special tokens have no text.
        context: tokens before the output, so that its first space isn't taken for a text's beginning.

    Attributes:
        stop_hit: the stop string that was found; nothing leaves after it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self.stop_hit: str | None = None
        self._decoder = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._window: list[int] = list(context)
        self._read = len(self._window)  # tokens of the window whose text has been taken
        self._text = self._decode(self._window)  # of those
        self._held = ""  # decoded, but it may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that may leave now, often none."""
        if self.stop_hit is not None:
            return ""
        self._window.append(token_id)
        whole = self._decode(self._window)
        if whole.endswith(HALF) and len(self._window) - self._read < LONGEST_CHARACTER:
            return ""
        new = whole[len(self._text) :]
        # The window keeps the tokens just read: the next one is decoded in their company.
        del self._window[: self._read]
        self._read = len(self._window)
        self._text = self._decode(self._window)
        return self._filter(new)

    def finish(self) -> str:
        """The output is at its end: returns what was held back, nothing if a stop string was found."""
        if self.stop_hit is not None:
            return ""
        new = self._decode(self._window)[len(self._text) :]
        self._window, self._read, self._text = [], 0, ""
        text = self._filter(new)
        held, self._held = self._held, ""
        return text if self.stop_hit is not None else text + held

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text: str = self._decoder.decode(token_ids, skip_special_tokens=self._skip)
        return text

    def _filter(self, new: str) -> str:
        """Let text through up to a stop string; hold back what may become one."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stop_hit = min(found)
            self._held = ""
            return text[: at + len(self.stop_hit)] if self._include_stop else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
