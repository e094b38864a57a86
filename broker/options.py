"""A settings struct, declared once, becomes flags, environment variables, ``--help`` and a README table.

Each actor declares a frozen `msgspec.Struct` whose fields are ``Annotated[type, Meta(description=…)]``
with a default. A field ``queue_limit`` is the flag ``--queue-limit`` and the environment variable
``LOADONCE_QUEUE_LIMIT``; a flag wins over the environment, the environment over the default. Bounds in
`Meta` (``ge``, ``le``, ``pattern`` …) are checked for both. Booleans take ``--compile``/``--no-compile``
and the words true/false/1/0/yes/no/on/off.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec

ENV_PREFIX: Final = "LOADONCE_"
EXIT_USAGE: Final = 2
NEARLY: Final = 0.85  # of `difflib`'s measure of likeness
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off"})

S = TypeVar("S", bound=msgspec.Struct)


class SettingError(ValueError):
    """A setting that can't be used; the sentence names the flag or the variable."""


class Option(msgspec.Struct, frozen=True):
    """One setting, as its declaration says it."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        """Whether the setting is a switch."""
        return self.base is bool

    @property
    def base(self) -> Any:
        """The type without `Annotated` and without ``| None``."""
        kind = self.type
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if get_origin(kind) in (Union, types.UnionType):
            (kind,) = [arm for arm in get_args(kind) if arm is not type(None)]
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        return kind

    def parse(self, text: str, source: str) -> Any:
        """Turn the text of a flag or variable (`source`) into a value.

        Raises:
            SettingError: the text isn't of the type, or past its bounds.
        """
        value: Any = text
        if self.is_bool:
            word = text.strip().lower()
            if word not in _TRUE | _FALSE:
                raise SettingError(f"{source}: expected true or false, got {text!r}")
            value = word in _TRUE
        elif type(None) in get_args(self.type) and text == "":
            value = None
        try:
            return msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError as problem:
            raise SettingError(f"{source}: {problem}, got {text!r}") from None


def options(settings: type[S]) -> list[Option]:
    """The settings of a struct in the order of their declaration."""
    hints = typing.get_type_hints(settings, include_extras=True)
    fields = msgspec.structs.fields(settings)
    return [Option(f.name, hints[f.name], f.default, _help(hints[f.name])) for f in fields]


def load(settings: type[S], prog: str, argv: Sequence[str], environ: Mapping[str, str]) -> S:
    """Read settings from flags and environment, or print one line and exit with `EXIT_USAGE`.

    Args:
        settings: the struct that declares them; each field needs a default.
        prog: what to call the program in messages, such as ``python -m broker``.
        argv: arguments without the program's name.
        environ: usually `os.environ`.
    """
    parser = _Parser(prog=prog, description=(settings.__doc__ or "").split("\n\n")[0])
    for option in options(settings):
        _add(parser, option)
    given = vars(parser.parse_args(list(argv)))
    for name, meant in misspelt(settings, environ):
        print(f"{prog}: warning: {name} is no setting; {meant} is", file=sys.stderr)
    try:
        return read(settings, {k: v for k, v in given.items() if v is not None}, environ)
    except SettingError as problem:
        parser.error(str(problem))


def misspelt(settings: type[S], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that are none of these settings and nearly the name of one, with that name.

    One environment serves all programs, so a variable that is unlike all of these is somebody else's.
    """
    known = {option.env.removeprefix(ENV_PREFIX): option.env for option in options(settings)}
    found = []
    for name in environ:
        rest = name.removeprefix(ENV_PREFIX)
        if name.startswith(ENV_PREFIX) and rest not in known:
            found += [(name, known[near]) for near in difflib.get_close_matches(rest, known, 1, NEARLY)]
    return found


def read(settings: type[S], flags: Mapping[str, str], environ: Mapping[str, str]) -> S:
    """Build the settings from already split flags and an environment.

    Raises:
        SettingError: a value isn't of its type or past its bounds.
    """
    values = {}
    for option in options(settings):
        if option.name in flags:
            values[option.name] = option.parse(flags[option.name], option.flag)
        elif option.env in environ:
            values[option.name] = option.parse(environ[option.env], option.env)
    return settings(**values)


def table(settings: type[S]) -> str:
    """The settings as a Markdown table, for README and docs."""
    rows = ["| flag | environment | default | what it does |", "|---|---|---|---|"]
    for option in options(settings):
        text = option.help.replace("|", "\\|")
        rows.append(f"| `{option.flag}` | `{option.env}` | {_shown(option.default)} | {text} |")
    return "\n".join(rows)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see --help)\n")


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    text = f"{option.help} [{option.env}; default {_shown(option.default)}]".replace("%", "%%")
    if option.is_bool:
        parser.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=text)
        off = "--no-" + option.flag[2:]
        parser.add_argument(
            off, dest=option.name, action="store_const", const="false", help=argparse.SUPPRESS
        )
        return
    choices = get_args(option.base) if get_origin(option.base) is Literal else None
    shown = "{" + ",".join(map(str, choices)) + "}" if choices else None
    parser.add_argument(option.flag, dest=option.name, metavar=shown, help=text)


def _help(kind: Any) -> str:
    metas = [m for m in getattr(kind, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
    return next((m.description for m in metas if m.description), "")


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"
