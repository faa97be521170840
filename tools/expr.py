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
        return _value(_parse(expr), env, expr)
    except ZeroDivisionError as error:
        raise ExprError(f"'{expr}' divides by zero") from error
    except RecursionError as error:
        raise ExprError(f"'{expr[:60]}…' is nested too deeply") from error


def _value(node: ast.expr, env: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.Name(id=name):
            if name not in env:
                raise ExprError(f"'{text}' names '{name}', which is not defined; known: {', '.join(sorted(env))}")
            result = env[name]
        case ast.BinOp(left=left, op=op, right=right):
            result = _BINARY[type(op)](_value(left, env, text), _value(right, env, text))
        case ast.UnaryOp(op=op, operand=operand):
            value = _value(operand, env, text)
            result = -value if isinstance(op, ast.USub) else int(not value)
        case ast.BoolOp(op=op, values=values):
            stop = 0 if isinstance(op, ast.And) else 1
            result = next((stop for v in values if bool(_value(v, env, text)) == bool(stop)), 1 - stop)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            result, a = 1, _value(left, env, text)
            for op_, right_node in zip(ops, rest, strict=True):
                b = _value(right_node, env, text)
                if not _COMPARE[type(op_)](a, b):
                    result = 0
                    break
                a = b
        case ast.IfExp(test=test, body=body, orelse=orelse):
            result = _value(body if _value(test, env, text) else orelse, env, text)
        case ast.Call(func=ast.Name(id=name), args=args):
            result = _FUNCTIONS[name](*(_value(a, env, text) for a in args))
        case _:  # pragma: no cover - _check admits nothing else
            raise ExprError(f"'{text}' is not an arithmetic expression")
    if abs(result) > MAX_VALUE:
        raise ExprError(f"'{text}' leaves the 62-bit range")
    return result
