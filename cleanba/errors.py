"""What the user did wrong, as opposed to what broke: one sentence with the value, the rule and the remedy."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A request that cannot be carried out as written; the command prints its message and exits with code 2."""


def nearest(value: int, fits: Callable[[int], bool], limit: int = 100_000) -> str:
    """The closest positive integers below and above `value` for which `fits` holds, as "119 or 126"."""
    below = next((n for n in range(value - 1, max(0, value - limit), -1) if fits(n)), None)
    above = next((n for n in range(value + 1, value + limit) if fits(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def closest_names(name: str, known: Iterable[str], count: int = 3) -> str:
    """The `count` known names most like `name`, compared without regard to case, separated by commas."""
    by_lower: dict[str, str] = {}
    for k in known:
        by_lower.setdefault(k.lower(), k)
    return ", ".join(by_lower[m] for m in get_close_matches(name.lower(), by_lower, count, cutoff=0.4))
