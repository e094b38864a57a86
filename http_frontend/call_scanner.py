"""Follows the JSON of one tool call as it comes, character by character, without waiting for its end.

Knows nothing of markers, lists or names that are allowed: `tools.py` does.
"""

from __future__ import annotations

import msgspec

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallScanner:
    """Reads ``{"name": …, "arguments": {…}}``, or with `name` given the arguments' object alone.

    Attributes:
        name: the function's name, once it is known.
        has_arguments: the arguments' value has begun, or the call has ended without one.
        done: the closing brace (and `closing`) was read.
        broken: this isn't the JSON of a call.
        begun: for the caller to set when it has told its reader about the call.
    """

    def __init__(self, *, name: str | None = None, closing: str = "") -> None:
        self.name = name
        self.has_arguments = name is not None
        self.done = False
        self.broken = False
        self.begun = False
        self._closing = closing
        self._bare = name is not None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # the key at depth 1 whose value is being read
        self._token = ""  # raw text of the key or the value being read
        self._expect_key = True
        self._ready = ""  # of the arguments, not yet given out
        self._quoted = False  # the arguments are a JSON string that holds JSON
        self._closed = ""

    def feed(self, text: str) -> tuple[int, str]:
        """Read on; returns how many characters belonged to the call, and what may leave of the arguments."""
        used = 0
        for char in text:
            if self.done or self.broken:
                break
            used += 1
            if self._depth == 0 and (self._closed or self.has_arguments and self._bare and self._ended):
                self._close(char)
            elif self._in_string:
                self._string(char)
            else:
                self._structure(char)
        return used, self._give()

    @property
    def _ended(self) -> bool:
        return self._expect_key is False and self._bare and self._key == "ended"

    def _give(self) -> str:
        if self.name is None or self._quoted:
            return ""
        ready, self._ready = self._ready, ""
        return ready

    def _string(self, char: str) -> None:
        self._note(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _structure(self, char: str) -> None:
        top = self._depth == 1 and not self._bare  # among the call's own keys
        if self._depth == 0:
            self.broken = char != "{"
            self._depth = 1
            self._note(char)
        elif char in "}]":
            self._down(char)
        elif top and char in ":,":
            self._separator(char)
        elif not (top and char in _SPACE):
            self._value(char, top)

    def _value(self, char: str, top: bool) -> None:
        """A character of a key or a value, outside strings."""
        if char == '"':
            self._in_string = True
        elif top and self._key is None and char not in _SPACE:
            self.broken = True  # a key is a string
        if char in "{[":
            self._depth += 1
        self._note(char)

    def _separator(self, char: str) -> None:
        if char == ",":
            self.broken = self._key is None
            self._end_value()
            return
        key = _decoded(self._token)
        self.broken = not isinstance(key, str) or self._key is not None
        self._key, self._token = str(key), ""

    def _down(self, char: str) -> None:
        self._depth -= 1
        if self._depth > 0:
            self._note(char)
            return
        self.broken = char != "}"
        if self._bare:
            self._note(char)
            self._key, self._expect_key = "ended", False
            self.done = not self._closing
            return
        if self._key is not None:
            self._end_value()
        if not self.has_arguments and self.name is not None:
            self.has_arguments, self._ready = True, "{}"
        self.done = True

    def _note(self, char: str) -> None:
        """One character of a key or a value; those of the arguments are given out as they come."""
        if self._bare:
            self._ready += char
            return
        if self._depth == 1 and char == "{" and not self._token and self._key is None:
            return  # the call's own opening brace
        if not self._token and char in _SPACE:
            return
        self._token += char
        if self._key in _ARGUMENTS:
            if not self.has_arguments:
                self.has_arguments = True
                self._quoted = char == '"'
            self._ready += char

    def _end_value(self) -> None:
        key, raw = self._key, self._token.strip()
        self._key, self._token = None, ""
        if key == "name":
            name = _decoded(raw)
            self.broken = self.broken or not isinstance(name, str)
            self.name = str(name)
        elif key in _ARGUMENTS and self._quoted:
            inner = _decoded(raw)
            self.broken = self.broken or not isinstance(inner, str)
            self._ready, self._quoted = str(inner), False

    def _close(self, char: str) -> None:
        """Between the object's end and the closing tag; white space is skipped."""
        if not self._closed and char in _SPACE:
            return
        self._closed += char
        if self._closed == self._closing:
            self.done = True
        elif not self._closing.startswith(self._closed):
            self.broken = True


def _decoded(raw: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        return None
