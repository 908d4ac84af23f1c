"""Filters: which rows of a source are kept, by an expression over their fields.

How it works: Python's own parser reads the expression, and a few kinds of its nodes are made into
functions; any other is refused. Nothing of Python is evaluated: there are no attributes of objects,
no calls but those of `_CALLS`, and no arithmetic but on numbers, so that the work of a row is
bounded by the length of the expression and of the row.

    len(text) > 200 and language == "en" and meta.score >= 0.5
"""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_MOST_CHARS = 2000
_GRAMMAR = (
    "fields (text, meta.score), texts, numbers, True, False, None, and, or, not, comparisons, in, "
    "+ - * / // % of numbers, (..., ...) after in, and the calls len, words, lower, upper, get"
)
Row = Mapping[str, Any]
Value = Callable[[Row], Any]

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_CALLS: Mapping[str, Callable[[Any], Any]] = {
    "len": len,
    "words": lambda text: len(str.split(text)),
    "lower": lambda text: str.lower(text),
    "upper": lambda text: str.upper(text),
}


class RowFilter:
    """An expression that is true of the rows that are kept."""

    def __init__(self, expression: str) -> None:
        """Read an expression.

        Raises:
            ValueError: it is none; one sentence.
        """
        self.expression = expression
        if len(expression) > _MOST_CHARS:
            raise ValueError(
                f"a filter of {len(expression)} characters is too long: use at most {_MOST_CHARS}."
            )
        tree = _parsed(expression)
        try:
            self._value = _Reader().value(tree.body)
        except RecursionError:
            raise ValueError("the filter is nested too deeply: write a shorter one.") from None
        names = (each.id for each in ast.walk(tree) if isinstance(each, ast.Name))
        self.fields: tuple[str, ...] = tuple(dict.fromkeys(n for n in names if n not in _FUNCTIONS))
        """Keys or columns that it reads."""

    def keeps(self, row: Row) -> bool:
        """Whether a row is kept.

        Raises:
            ValueError: the row has no such field, or one of another type; one sentence.
        """
        try:
            kept = self._value(row)
        except _NoFieldError as error:
            known = ", ".join(f'"{name}"' for name in row) or "none at all"
            raise ValueError(
                f'there is no "{error}" for the filter {self.expression!r} but {known}: correct '
                "the filter, or use get(field, otherwise) where only some rows have it."
            ) from None
        except (TypeError, ArithmeticError) as error:
            raise ValueError(
                f"the filter {self.expression!r} can't be used ({error}): correct it."
            ) from None
        if not isinstance(kept, bool):
            raise ValueError(
                f"the filter {self.expression!r} gives {kept!r:.40}, which is neither True nor "
                "False: compare it with something."
            )
        return kept


def _parsed(expression: str) -> ast.Expression:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "\\d" in a text
            return ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{expression!r} is no expression ({error}): correct it.") from None
    except (RecursionError, MemoryError):
        raise ValueError("the filter is nested too deeply: write a shorter one.") from None


class _NoFieldError(Exception):
    """Of a row."""


class _Reader:
    """Makes functions of the nodes of an expression."""

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None as constant):
                return lambda _row: constant
            case ast.Name(id=name) if name not in _FUNCTIONS:
                return lambda row: _field(row, name, name)
            case ast.Attribute(value=ast.Name() | ast.Attribute() as inner, attr=name):
                whole, path = self.value(inner), ast.unparse(node)
                return lambda row: _field(whole(row), name, path)
            case ast.BoolOp(op=op, values=values):
                return _joined(isinstance(op, ast.And), [self.value(each) for each in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner_value = self.value(operand)
                return lambda row: not _truth(inner_value(row))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner_value = self.value(operand)
                return lambda row: -_number(inner_value(row))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _calculated(_ARITHMETIC[type(op)], self.value(left), self.value(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compared(left, ops, others)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._called(name, args)
        raise _outside(node)

    def _compared(
        self, left: ast.expr, ops: Sequence[ast.cmpop], others: Sequence[ast.expr]
    ) -> Value:
        values = [self.value(left)]
        for op, other in zip(ops, others, strict=True):
            if isinstance(other, ast.Tuple | ast.List):
                if not isinstance(op, ast.In | ast.NotIn):
                    raise _outside(other)
                values.append(_listed([self.value(each) for each in other.elts]))
            else:
                values.append(self.value(other))
        compare = [_COMPARE[type(op)] for op in ops]

        def compared(row: Row) -> bool:
            before = values[0](row)
            for test, value in zip(compare, values[1:], strict=True):
                after = value(row)
                if not test(before, after):
                    return False
                before = after
            return True

        return compared

    def _called(self, name: str, args: Sequence[ast.expr]) -> Value:
        if name == "get" and len(args) == 2 and isinstance(args[0], ast.Name | ast.Attribute):
            field, otherwise = self.value(args[0]), self.value(args[1])
            return lambda row: _given(field, otherwise, row)
        if name in _CALLS and len(args) == 1:
            call, argument = _CALLS[name], self.value(args[0])
            return lambda row: call(argument(row))
        raise ValueError(f"{name}() with {len(args)} arguments is no part of a filter: {_USE}")


_FUNCTIONS = (*_CALLS, "get")
_USE = f"use {_GRAMMAR}."


def _outside(node: ast.AST) -> ValueError:
    return ValueError(f"{ast.unparse(node)!r:.60} is no part of a filter: {_USE}")


def _field(row: Any, name: str, path: str) -> Any:
    if not isinstance(row, Mapping) or name not in row:
        raise _NoFieldError(path)
    return row[name]


def _given(field: Value, otherwise: Value, row: Row) -> Any:
    try:
        found = field(row)
    except _NoFieldError:
        found = None
    return otherwise(row) if found is None else found


def _joined(is_and: bool, values: Sequence[Value]) -> Value:
    if is_and:
        return lambda row: all(_truth(value(row)) for value in values)
    return lambda row: any(_truth(value(row)) for value in values)


def _calculated(operate: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    return lambda row: operate(_number(left(row)), _number(right(row)))


def _listed(values: Sequence[Value]) -> Value:
    return lambda row: [value(row) for value in values]


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is neither True nor False")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    return value


@cache
def row_filter(expression: str) -> RowFilter:
    """The filter of an expression, which is read once."""
    return RowFilter(expression)


def _check(expression: str | None) -> str | None:
    if expression is not None:
        row_filter(expression)
    return expression


FilterText = Annotated[str | None, Field(min_length=1), AfterValidator(_check)]
"""An expression, checked; None: all rows are kept."""
