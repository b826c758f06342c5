"""How flag values are parsed where tyro's own rules do not suffice."""

from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from cleanba.files import expanded

MOST_DIGITS = 30  # a longer number is a typing error, and would take forever to write out

FLAGS = ConstructorRegistry()
"""passed as `registry` to every `tyro.cli`"""


def whole_number(word: str) -> int:
    """Parse a whole number, such as 1000, 1e6 or 2.5e5.

    Raises:
        ValueError: the word is not a whole number.
    """
    with suppress(ValueError):
        if len(word) <= MOST_DIGITS:
            return int(word)
    try:
        number = Decimal(word)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number.adjusted() > MOST_DIGITS or number != number.to_integral_value():
        raise ValueError(f"{word!r} is not a whole number; write it as 1000000 or 1e6")
    return int(number)


def of_one_word(kind: type[Any], metavar: str, read: Callable[[str], Any]) -> None:
    """Have every flag of this type read from its one word by `read`, which raises `ValueError` for another word."""

    @FLAGS.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is not kind:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: read(words[0]),
            is_instance=lambda x: isinstance(x, kind),
            str_from_instance=lambda value: [str(value)],
        )


def number(word: str) -> float:
    """Parse a number, such as 0.5 or 1e-3.  Raises `ValueError` for another word."""
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number; write it as 0.001 or 1e-3") from None


of_one_word(int, "INT", whole_number)
of_one_word(float, "FLOAT", number)
of_one_word(Path, "PATH", expanded)  # shells leave the ~ of --run-dir=~/runs as it is
