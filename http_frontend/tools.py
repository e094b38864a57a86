"""Tool calls: what a request says about them, and calls read out of a model's text. Does no I/O.

Families, told apart by what they write: Hermes and Qwen ``<tool_call>{…}</tool_call>``, Llama 3 ``{…}``
with or without ``<|python_tag|>`` and ``<function=name>{…}</function>``, Mistral ``[TOOL_CALLS][{…}]``
(the marker may be missing, it is a special token). Text that only looks like a call stays text.
A forced call is a grammar, the same for every family: see `forced_grammar`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import msgspec

from broker.errors import InvalidRequest
from broker.protocol import Grammar
from http_frontend import free_json
from http_frontend.call_scanner import CallScanner
from http_frontend.openai_types import ChatRequest, NamedTool, Tool, ToolCall

# ── what the request says ────────────────────────────────────────────────────────────────────────


def for_template(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the model's template shows it; None if it is to call none.

    Raises:
        InvalidRequest: two tools share a name.
    """
    listed = shown(body.tools)
    return None if body.tool_choice == "none" else listed


def shown(given: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as the template is given them; None if there are none.

    Raises:
        InvalidRequest: two share a name, or parameters are past the bounds of `free_json`.
    """
    listed = given or []
    names = [tool.function.name for tool in listed]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two functions have the same name.", param="tools")
    for place, tool in enumerate(listed):
        if tool.function.parameters is not None:
            free_json.check(tool.function.parameters, f"tools[{place}].function.parameters")
    return [msgspec.to_builtins(tool) for tool in listed] or None


def sent_back(calls: Sequence[ToolCall], where: str) -> list[dict[str, Any]]:
    """An assistant's earlier calls, arguments as objects, as templates want them.

    Raises:
        InvalidRequest: arguments aren't the JSON of an object.
    """
    found = []
    for place, call in enumerate(calls):
        param = f"{where}.tool_calls[{place}].function.arguments"
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as problem:
            raise InvalidRequest(f"{param}: {problem}.", param=param) from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{param}: not a JSON object.", param=param)
        free_json.check(arguments, param)
        function = {"name": call.function.name, "arguments": arguments}
        found.append({"id": call.id, "type": "function", "function": function})
    return found


def forced_grammar(body: ChatRequest) -> Grammar | None:
    """The grammar of `tool_choice` required (a list of calls) or named (one function's arguments).

    Raises:
        InvalidRequest: there are no tools to choose from, or not the one that is named.
    """
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    if not body.tools:
        raise InvalidRequest("tool_choice: there are no tools.", param="tool_choice")
    if isinstance(choice, NamedTool):
        for tool in body.tools:
            if tool.function.name == choice.function.name:
                return _schema_grammar(_parameters(tool))
        raise InvalidRequest(f"tool_choice: no tool {choice.function.name!r}.", param="tool_choice")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in body.tools]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return _schema_grammar(schema)


def _schema_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call; what its parameters define moves to the root under the tool's name."""
    name = tool.function.name
    parameters = dict(_parameters(tool))
    for key in ("$defs", "definitions"):
        for inner, schema in (parameters.pop(key, None) or {}).items():
            definitions[f"{name}.{inner}"] = _moved(schema, name)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": _moved(parameters, name)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return [_moved(part, name) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, name) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str):
        for prefix in ("#/$defs/", "#/definitions/"):
            if target.startswith(prefix):
                moved["$ref"] = f"#/$defs/{name}.{target.removeprefix(prefix)}"
    return moved


# ── what the model wrote ─────────────────────────────────────────────────────────────────────────


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins; the name is known."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments' JSON text."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments

_MARKERS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
_BETWEEN: Final = "; \t\r\n"  # what may stand between two calls
MAX_NAME_CHARS: Final = 128  # no name is longer, markers around it included
_Mode = Literal["auto", "list", "named"]


class ToolText:
    """Reads calls out of text that comes in pieces; pieces may be cut anywhere.

    Args:
        names: functions of the request; a call of any other is text.
        mode: ``auto`` looks for the families' formats; ``list`` and ``named`` read what
            `forced_grammar` makes the model write.
        named: the function whose arguments the text is, in mode ``named``.
        most: calls after these are dropped.
    """

    def __init__(
        self, names: Collection[str], *, mode: _Mode = "auto", named: str = "", most: int = 2**31
    ) -> None:
        self._names = names
        self._mode = mode
        self._named = named
        self._most = most
        self._held = ""  # not yet understood
        self._taken = ""  # understood as part of a call, given back as text if it turns out to be none
        self._scanner: CallScanner | None = None
        self._listed = mode == "list"  # between calls, a comma or a bracket is expected
        self._fresh = True  # nothing but white space so far, or since the last call
        self._out: list[Delta] = []
        self.calls = 0  # begun so far

    @classmethod
    def of(cls, body: ChatRequest) -> ToolText | None:
        """The reader for a request; None where nothing can be called."""
        if not body.tools or body.tool_choice == "none":
            return None
        names = frozenset(tool.function.name for tool in body.tools)
        most = 1 if body.parallel_tool_calls is False else 2**31
        if isinstance(body.tool_choice, NamedTool):
            return cls(names, mode="named", named=body.tool_choice.function.name, most=most)
        return cls(names, mode="list" if body.tool_choice == "required" else "auto", most=most)

    def push(self, text: str) -> list[Delta]:
        """What may leave now."""
        if self._mode == "named":
            return self._push_named(text)
        self._held += text
        while self._held and self._step():
            pass
        return self._take_out()

    def finish(self) -> list[Delta]:
        """What is left when the text has ended."""
        if self._scanner is None or not self._scanner.begun:
            self._say(self._taken + self._held)
        self._held = self._taken = ""
        return self._take_out()

    def _push_named(self, text: str) -> list[Delta]:
        if not text:
            return []
        if not self.calls:
            self._begin(self._named)
        self._out.append(CallArguments(0, text))
        return self._take_out()

    def _take_out(self) -> list[Delta]:
        out, self._out = self._out, []
        return [d for d in out if isinstance(d, Content) or d.index < self._most]

    def _step(self) -> bool:
        """Understand a little more of what is held; False if more text is needed first."""
        if self._scanner is not None:
            return self._scan(self._scanner)
        if self._listed:
            return self._between()
        return self._look()

    def _look(self) -> bool:
        """In text: look for a marker, or a bare object or list where an answer or a call may begin."""
        held = self._held
        if self._fresh:
            bare = held.lstrip(_BETWEEN if self.calls else None)
            if not bare:
                return False
            if bare[0] == "{" or (bare[0] == "[" and not _could_be(bare, "[TOOL_CALLS]")):
                self._eat(len(held) - len(bare))
                return self._open(listed=bare[0] == "[")
        place, marker = min(((held.find(m), m) for m in _MARKERS if m in held), default=(-1, ""))
        if place >= 0:
            self._say(held[:place], drop_blank=True)
            self._held = held[place:]
            return self._enter(marker)
        kept = _tail_that_could_be_marker(held)
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]
        return False

    def _enter(self, marker: str) -> bool:
        if marker == "<function=":
            return self._enter_function()
        rest = self._held[len(marker) :].lstrip()
        if marker == "</tool_call>":
            self._held, self._fresh = self._held[len(marker) :], True
            return True
        if not rest:
            return False
        if rest[0] in "{[":
            self._eat(len(self._held) - len(rest))
            return self._open(listed=rest[0] == "[")
        if marker == "[TOOL_CALLS]":
            return self._enter_mistral_name()
        self._eat(len(marker))
        return self._give_up()

    def _enter_function(self) -> bool:
        end = self._held.find(">")
        if end < 0:
            if len(self._held) <= MAX_NAME_CHARS:
                return False
            self._eat(len("<function="))
            return self._give_up()
        name = self._held[len("<function=") : end]
        self._eat(end + 1)
        return self._open_arguments(name, closing="</function>")

    def _enter_mistral_name(self) -> bool:
        brace = self._held.find("{")
        if brace < 0:
            if len(self._held) <= MAX_NAME_CHARS:
                return False
            self._eat(len("[TOOL_CALLS]"))
            return self._give_up()
        name = self._held[len("[TOOL_CALLS]") : brace].removesuffix("[ARGS]").strip()
        self._eat(brace)
        return self._open_arguments(name)

    def _open_arguments(self, name: str, closing: str = "") -> bool:
        if name not in self._names:
            return self._give_up()
        self._scanner = CallScanner(name=name, closing=closing)
        return True

    def _open(self, *, listed: bool) -> bool:
        """A bare object, or a list of them, begins at the head of what is held."""
        self._listed = listed
        if listed:
            self._eat(1)
            return True
        self._scanner = CallScanner()
        return True

    def _between(self) -> bool:
        """In a list: the next object, a comma, or the end."""
        rest = self._held.lstrip()
        if not rest:
            return False
        self._eat(len(self._held) - len(rest))
        if rest[0] == "{":
            self._scanner = CallScanner()
            return True
        if rest[0] in ",[" and (self.calls or self._mode == "list"):
            self._eat(1)
            return True
        if rest[0] == "]" and self.calls:
            self._eat(1)
            self._taken, self._listed, self._fresh = "", False, True
            return True
        return self._give_up()

    def _scan(self, scanner: CallScanner) -> bool:
        used, fragment = scanner.feed(self._held)
        self._taken += self._held[:used]
        self._held = self._held[used:]
        if scanner.broken or (scanner.name is not None and scanner.name not in self._names):
            return self._give_up()
        if scanner.name is not None and not scanner.begun and scanner.has_arguments:
            scanner.begun = True
            self._begin(scanner.name)
        if scanner.begun and fragment:
            self._out.append(CallArguments(self.calls - 1, fragment))
        if scanner.done:
            if not scanner.begun:
                return self._give_up()
            self._scanner, self._taken, self._fresh = None, "", True
            return True
        return False

    def _begin(self, name: str) -> None:
        self._out.append(CallStart(self.calls, f"call_{secrets.token_hex(12)}", name))
        self.calls += 1

    def _give_up(self) -> bool:
        """It was no call: what was taken is text after all."""
        begun = self._scanner is not None and self._scanner.begun
        taken, self._taken = self._taken, ""
        self._scanner, self._listed = None, False
        if not begun:
            self._say(taken)
        self._fresh = False
        return True

    def _eat(self, count: int) -> None:
        self._taken += self._held[:count]
        self._held = self._held[count:]

    def _say(self, text: str, *, drop_blank: bool = False) -> None:
        if self.calls and (self._fresh or drop_blank):
            text = text.lstrip(_BETWEEN)
        elif drop_blank and not text.strip():
            text = ""
        if text:
            self._fresh = False
            self._out.append(Content(text))


def _could_be(text: str, marker: str) -> bool:
    return marker.startswith(text) or text.startswith(marker)


def _tail_that_could_be_marker(text: str) -> int:
    """How many of the last characters may be the beginning of a marker."""
    longest = min(len(text), max(map(len, _MARKERS)) - 1)
    for size in range(longest, 0, -1):
        if any(m.startswith(text[-size:]) for m in _MARKERS):
            return size
    return 0
