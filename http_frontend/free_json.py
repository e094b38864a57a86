"""Bounds on JSON that no struct describes: schemas, tools' parameters, arguments of earlier calls."""

from __future__ import annotations

from typing import Any, Final

from broker.errors import InvalidRequest

MAX_DEPTH: Final = 64
_LEAST, _MOST = -(2**63), 2**64 - 1  # integers that msgpack can carry


def check(value: Any, param: str) -> None:
    """Refuse what can't go on the wire, or would take a reader's stack.

    Raises:
        InvalidRequest: nested more than `MAX_DEPTH` deep, or an integer past 64 bits.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
            elif isinstance(one, int) and not _LEAST <= one <= _MOST:
                raise InvalidRequest(f"{param}: holds an integer past 64 bits.", param=param)
        if not inner:
            return
        level = inner
    raise InvalidRequest(f"{param}: nested more than {MAX_DEPTH} deep.", param=param)
