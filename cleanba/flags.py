"""How flag values are parsed where tyro's own rules do not suffice."""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

MOST_DIGITS = 30  # a longer number is a typing error, and would take forever to write out

FLAGS = ConstructorRegistry()
"""passed as `registry` to every `tyro.cli`"""


def whole_number(word: str) -> int:
    """Parse a whole number, such as 1000, 1e6 or 2.5e5.

    Raises:
        ValueError: the word is not a whole number.
    """
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = Decimal(word)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number.adjusted() > MOST_DIGITS or number != number.to_integral_value():
        raise ValueError(f"{word!r} is not a whole number; write it as 1000000 or 1e6")
    return int(number)


@FLAGS.primitive_rule
def read_paths(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Tyro's rule for flags that are paths: shells leave the ~ of --run-dir=~/runs as it is."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: Path(words[0]).expanduser(),
        is_instance=lambda x: isinstance(x, Path),
        str_from_instance=lambda path: [str(path)],
    )


@FLAGS.primitive_rule
def read_whole_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Tyro's rule for flags that are whole numbers."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda x: isinstance(x, int),
        str_from_instance=lambda number: [str(number)],
    )
