"""Whitelisted arithmetic over named integers: what a manifest and a launch spec may compute. Never ``eval``'d.

Allowed: integers, names, ``+ - * // %``, unary minus, comparisons (chained too), ``and or not``,
``x if c else y`` and the functions ``ceil_div``, ``min``, ``max``. Division is floor division.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache

from tools.records import Expr

MAX_LENGTH = 400
MAX_VALUE = 2**62


class ExprError(ValueError):
    """The expression is not arithmetic, names something unknown, or leaves the 62-bit range."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


_FUNCTIONS: dict[str, Callable[..., int]] = {"ceil_div": ceil_div, "min": min, "max": max}
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ExprError(f"expression is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree, text)
    except ExprError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExprError(f"'{text}' is not an arithmetic expression") from error
    return tree


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return
        case ast.Name():
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            children = [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            children = [operand]
        case ast.BoolOp(values=values):
            children = values
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARE for op in ops):
            children = [left, *rest]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            children = [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            wrong = len(args) != 2 if name == "ceil_div" else len(args) < 2
            if wrong or any(isinstance(a, ast.Starred) for a in args):
                raise ExprError(f"'{text}': {name} has the wrong number of arguments")
            children = args
        case _:
            raise ExprError(
                f"'{text}' is not an arithmetic expression: "
                "only integers, names, + - * // %, comparisons, and/or/not, if/else, ceil_div, min and max are allowed"
            )
    for child in children:
        _check(child, text)


def names(expr: Expr) -> frozenset[str]:
    """The free names of an expression."""
    if isinstance(expr, int):
        return frozenset()
    calls = set(_FUNCTIONS)
    return frozenset(n.id for n in ast.walk(_parse(expr)) if isinstance(n, ast.Name) and n.id not in calls)


def evaluate(expr: Expr, env: Mapping[str, int]) -> int:
    """The value of ``expr`` (booleans as 0 or 1). Raises ExprError, with the expression in the message."""
    if isinstance(expr, int):
        if abs(expr) > MAX_VALUE:
            raise ExprError(f"{'an integer' if expr.bit_length() > 128 else expr} leaves the 62-bit range")
        return int(expr)
    try:
        return _compiled(expr)(env)
    except ZeroDivisionError as error:
        raise ExprError(f"'{expr}' divides by zero") from error
    except RecursionError as error:
        raise ExprError(f"'{expr[:60]}…' is nested too deeply") from error


#: Closures, not the tree walked each time: which plans a shape takes is asked some hundred thousand times.
_Evaluator = Callable[[Mapping[str, int]], int]


@lru_cache(maxsize=4096)
def _compiled(text: str) -> _Evaluator:
    return _evaluator(_parse(text), text)


def _evaluator(node: ast.expr, text: str) -> _Evaluator:
    def of(part: ast.expr) -> _Evaluator:
        return _evaluator(part, text)

    match node:
        case ast.Constant(value=int(value)):
            return _in_range(lambda _: value, text)
        case ast.Name(id=name):
            return _in_range(_named(name, text), text)
        case ast.BinOp(left=left, op=op, right=right):
            return _in_range(_binary(_BINARY[type(op)], of(left), of(right)), text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            negated = of(operand)
            return lambda env: -negated(env)
        case ast.UnaryOp(operand=operand):
            denied = of(operand)
            return lambda env: int(not denied(env))
        case ast.BoolOp(op=ast.And(), values=values):
            conjuncts = [of(value) for value in values]
            return lambda env: int(all(one(env) for one in conjuncts))
        case ast.BoolOp(values=values):
            disjuncts = [of(value) for value in values]
            return lambda env: int(any(one(env) for one in disjuncts))
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return _chain(of(left), [(_COMPARE[type(op)], of(right)) for op, right in zip(ops, rest, strict=True)])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, yes, no = of(test), of(body), of(orelse)
            return lambda env: yes(env) if condition(env) else no(env)
        case ast.Call(func=ast.Name(id=name), args=args):
            function, values_of = _FUNCTIONS[name], [of(arg) for arg in args]
            return _in_range(lambda env: function(*(one(env) for one in values_of)), text)
    raise ExprError(f"'{text}' is not an arithmetic expression")  # pragma: no cover - _check admits nothing else


def _in_range(value_of: _Evaluator, text: str) -> _Evaluator:
    def checked(env: Mapping[str, int]) -> int:
        value = value_of(env)
        if not -MAX_VALUE <= value <= MAX_VALUE:
            raise ExprError(f"'{text}' leaves the 62-bit range")
        return value

    return checked


def _named(name: str, text: str) -> _Evaluator:
    def value_of(env: Mapping[str, int]) -> int:
        if name not in env:
            raise ExprError(f"'{text}' names '{name}', which is not defined; known: {', '.join(sorted(env))}")
        return env[name]

    return value_of


def _binary(operator: Callable[[int, int], int], left: _Evaluator, right: _Evaluator) -> _Evaluator:
    return lambda env: operator(left(env), right(env))


def _chain(first: _Evaluator, rest: list[tuple[Callable[[int, int], bool], _Evaluator]]) -> _Evaluator:
    def holds(env: Mapping[str, int]) -> int:
        a = first(env)
        for compare, right in rest:
            b = right(env)
            if not compare(a, b):
                return 0
            a = b
        return 1

    return holds
