"""Prints the shape of the product's code beside the targets of the house style. A look, not a gate."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("broker", "gpu_worker", "http_frontend")
LONG_FILE, LONG_FUNCTION, COMPLEX = 400, 80, 10
BRANCHES: Final = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Measure every file of the actors and print one table and the outliers by name."""
    paths = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
    lines = {p: len(p.read_text().splitlines()) for p in paths}
    functions = [(p, f) for p in paths for f in functions_of(p)]
    lengths = [length(f) for _, f in functions]
    complexities = [complexity(f) for _, f in functions]
    share = sum(c > COMPLEX for c in complexities) / max(1, len(functions))
    print(f"shape: {len(paths)} files, {sum(lines.values())} lines, {len(functions)} functions")
    middle = statistics.median(lines.values())
    print(f"  file lines      median {middle:.0f} (≤ 140), longest {max(lines.values())} (≤ {LONG_FILE})")
    print(f"  function lines  p95 {p95(lengths)} (≤ 40), longest {max(lengths)} (≤ {LONG_FUNCTION})")
    print(f"  complexity      p95 {p95(complexities)} (≤ 7), over {COMPLEX}: {share:.1%} (≤ 1.5%)")
    for path, count in lines.items():
        if count > LONG_FILE:
            print(f"  long file       {path.relative_to(ROOT)} {count}")
    for path, function in functions:
        if length(function) > LONG_FUNCTION:
            print(f"  long function   {where(path, function)} {length(function)}")
        if complexity(function) > COMPLEX:
            print(f"  complex         {where(path, function)} {complexity(function)}")
        if depth(function) > 4:
            print(f"  deep            {where(path, function)} {depth(function)}")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                print(f"  broad except    {path.relative_to(ROOT)}:{node.lineno}")


def functions_of(path: Path) -> list[Function]:
    """All functions and methods of a file."""
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, Function)]


def length(function: Function) -> int:
    """Lines from ``def`` to the end, the docstring left out."""
    first = function.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    doc = (first.end_lineno or 0) - first.lineno + 1 if is_doc else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc


def complexity(function: Function) -> int:
    """McCabe's number: one and each branch."""
    nodes = list(ast.walk(function))
    return (
        1
        + sum(isinstance(n, BRANCHES) for n in nodes)
        + sum(len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp))
    )


def depth(node: ast.AST, level: int = 0) -> int:
    """How deeply statements are nested."""
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
    inner = [depth(c, level + isinstance(c, blocks)) for c in ast.iter_child_nodes(node)]
    return max([level, *inner])


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything."""
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def p95(values: list[int]) -> int:
    """The 95th percentile."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


def where(path: Path, function: Function) -> str:
    """File, line and name."""
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


if __name__ == "__main__":
    main()
