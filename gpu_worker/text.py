"""Tokens → text that may leave the worker. Knows nothing of requests, batches or the wire.

Decodes a small window of tokens at a time: what a token adds is the difference between the window's text
with and without it, so that spaces which a decoder drops at the beginning of a text stay where they belong,
and the work for a token doesn't grow with the length of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

HALF: Final = "\N{REPLACEMENT CHARACTER}"
#: Tokens without a whole character at their end after which the window moves on all the same.
LONGEST_CHARACTER: Final = 16


class TextStream:
    """Incremental text of one output.

    The pieces that `push` and `finish` return, joined, are the text of all tokens up to the first stop
    string. No piece ends in half a character, and none holds any part of a stop string (but the whole of
    it, with `include_stop`). Invalid bytes become U+FFFD; of a run of SentencePiece's byte tokens with an
    invalid end, the characters before it stay, where a decoder that sees all of it at once drops them too.

    Args:
        tokenizer: a fast tokenizer; used in the calling thread only.
        stop: strings that end the output; the one that is complete first counts, of two the longer.
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
        self._stops = [_Stop(text) for text in stop]
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
        half = whole.endswith(HALF)
        if half and len(self._window) - self._read < LONGEST_CHARACTER:
            return ""
        return self._filter(self._take(whole, half))

    def finish(self) -> str:
        """The output is at its end: returns what was held back, nothing if a stop string was found."""
        if self.stop_hit is not None:
            return ""
        text = self._filter(self._take(self._decode(self._window), half=False))
        held, self._held = self._held, ""
        return text if self.stop_hit is not None else text + held

    def _take(self, whole: str, half: bool) -> str:
        """What is new in the window's text, but for half a character at its end. The window moves on."""
        end = len(whole) - half
        if whole.startswith(self._text):
            new = whole[len(self._text) : end]
        else:  # an invalid byte has made the bytes before it invalid too, which had left as a character
            alone = self._decode(self._window[self._read :])
            new = alone[: len(alone) - half]
        # The window keeps the tokens just read: the next one is decoded in their company.
        del self._window[: self._read]
        self._read = len(self._window)
        text = self._decode(self._window)
        self._text = text[: len(text) - half]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text: str = self._decoder.decode(token_ids, skip_special_tokens=self._skip)
        return text

    def _filter(self, new: str) -> str:
        """Let text through up to a stop string; hold back what may become one."""
        if not self._stops:
            return new
        text = self._held + new
        for at, character in enumerate(new, start=len(self._held) + 1):
            found = [stop.text for stop in self._stops if stop.completes(character)]
            if found:
                self.stop_hit = max(found, key=len)
                self._held = ""
                return text[:at] if self._include_stop else text[: at - len(self.stop_hit)]
        keep = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Stop:
    """A stop string, and how much of it the text so far ends with (Knuth, Morris and Pratt, 1977).

    Attributes:
        text: the string.
        matched: the longest end of the text with which the string begins, in characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0]  # for each beginning of the string: the next shorter one that also ends it
        for character in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != character:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == character))

    def completes(self, character: str) -> bool:
        """Take the text's next character; True if the string is complete with it."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
