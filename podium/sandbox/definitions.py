"""Finds the definitions that Python code needs from other code: those of names that it uses but does not define."""

import ast
import builtins
from collections.abc import Iterator, Sequence

Definition = (
    ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
)


def wanted(tree: ast.AST, others: Sequence[str]) -> ast.Module:
    """The definitions in `others` of names that a module uses and does not make, in their order.

    Of two definitions of a name the later one is meant. A text that is not Python has none.
    """
    found = [each for text in others for each in _definitions(text)]
    by_name = {name: each for each in found for name in _made(each)}
    chosen: set[int] = set()
    missing = _used(tree) - _made_anywhere(tree) - set(dir(builtins))
    while missing:
        definition = by_name.get(missing.pop())
        if definition is not None and id(definition) not in chosen:
            chosen.add(id(definition))
            missing |= _used(definition) - set(dir(builtins))
    return ast.Module([each for each in found if id(each) in chosen], [])


def _definitions(text: str) -> list[Definition]:
    try:
        return [each for each in ast.parse(text).body if isinstance(each, Definition)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _made(node: ast.AST) -> Iterator[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((each.asname or each.name).partition(".")[0] for each in names)
        case ast.Assign(targets=targets):
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case _:
            pass


def _made_anywhere(tree: ast.AST) -> set[str]:
    stored = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    arguments = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    return stored | arguments | {name for each in ast.walk(tree) for name in _made(each)}


def _used(tree: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
