"""Conditions between parameters, as a job writes them: `max_num_batched_tokens >= 4 * max_num_seqs`.

A small language read by Python's parser and walked by hand: names of parameters, numbers, texts, true and false,
`+ - * / // %`, comparisons, `in` a list, `and`, `or`, `not` and brackets. Nothing is called and nothing is looked up.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str | None

MOST_CHARACTERS = 500
MOST_PARTS = 100

_WORDS: Mapping[str, Value] = {"true": True, "false": False, "null": None}
"""YAML's spellings, beside Python's own."""


class ConditionError(ValueError):
    """A condition that cannot be read, or that compares what cannot be compared."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was read."""

    text: str
    tree: ast.expr = field(compare=False, repr=False)

    @property
    def names(self) -> set[str]:
        """The parameters it looks at."""
        return {part.id for part in ast.walk(self.tree) if isinstance(part, ast.Name)} - _WORDS.keys()

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Whether `values` meet the condition.

        Raises:
            ConditionError: for a division by zero, or an operation that its values do not have.
        """
        result = _evaluate(self.tree, values)
        if not isinstance(result, bool):
            raise ConditionError(f"{self.text!r} gives {result!r}, which is neither true nor false")
        return result


def parse_condition(text: str, names: set[str]) -> Condition:
    """Read a condition over the parameters `names`.

    Raises:
        ConditionError: naming what is not part of the language, or the parameter that is not known.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConditionError(f"a condition of {len(text)} characters is too long: at most {MOST_CHARACTERS}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConditionError(f"{text!r} cannot be read: {error}") from None
    parts = list(ast.walk(tree))
    if len(parts) > MOST_PARTS:
        raise ConditionError(f"{text!r} is too long: it has {len(parts)} parts, at most {MOST_PARTS}")
    for part in parts:
        _check_part(text, part, names)
    return Condition(text=text, tree=tree.body)


def _check_part(text: str, part: ast.AST, names: set[str]) -> None:
    if not isinstance(part, _ALLOWED):
        raise ConditionError(f"{text!r}: {type(part).__name__} is not part of the language of conditions")
    if isinstance(part, ast.Name) and part.id not in names | _WORDS.keys():
        raise ConditionError(f"{text!r}: {part.id} is no parameter here; there are {', '.join(sorted(names))}")
    if isinstance(part, ast.Constant) and not isinstance(part.value, bool | int | float | str | None):
        raise ConditionError(f"{text!r}: {part.value!r} is neither a number nor a text")


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name] if name in values else _WORDS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return tuple(_evaluate(element, values) for element in elements)
        case ast.UnaryOp(op=how, operand=operand):
            given = _evaluate(operand, values)
            return not _truth(given) if isinstance(how, ast.Not) else -_number(given)
        case ast.BinOp(left=left, op=how, right=right):
            return _computed(how, _number(_evaluate(left, values)), _number(_evaluate(right, values)))
        case ast.BoolOp(op=how, values=parts):
            truths = (_truth(_evaluate(part, values)) for part in parts)
            return all(truths) if isinstance(how, ast.And) else any(truths)
        case ast.Compare():
            return _compared(node, values)
    raise ConditionError(f"{ast.unparse(node)!r} is not part of the language of conditions")


def _computed(how: ast.operator, left: float, right: float) -> float:
    try:
        return _ARITHMETIC[type(how)](left, right)
    except (ZeroDivisionError, OverflowError) as error:
        raise ConditionError(f"{left:g} and {right:g}: {error}") from None


def _compared(node: ast.Compare, values: Mapping[str, Value]) -> bool:
    left = _evaluate(node.left, values)
    for how, operand in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(operand, values)
        if not _COMPARISONS[type(how)](left, right):
            return False
        left = right
    return True


def _number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ConditionError(f"{value!r} is not a number")


def _truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConditionError(f"{value!r} is neither true nor false")


def _is_in(value: object, elements: object) -> bool:
    if isinstance(elements, tuple):
        return value in elements
    raise ConditionError(f"{elements!r} is not a list")


_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: lambda left, right: _number(left) < _number(right),
    ast.LtE: lambda left, right: _number(left) <= _number(right),
    ast.Gt: lambda left, right: _number(left) > _number(right),
    ast.GtE: lambda left, right: _number(left) >= _number(right),
    ast.In: _is_in,
    ast.NotIn: lambda left, right: not _is_in(left, right),
}
_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare, ast.Name),
    *(ast.Load, ast.Constant, ast.List, ast.Tuple, *_ARITHMETIC, *_COMPARISONS),
)
