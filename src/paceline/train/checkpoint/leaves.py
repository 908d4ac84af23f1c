"""The entries of a nested state, by their dotted path."""

from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """An entry of a nested dict, and where to replace it."""

    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """The entry."""
        return self.holder[self.key]


def leaves(nested: dict[str, Any], prefix: str = "") -> dict[str, Leaf]:
    """Return the entries of nested dicts by their dotted path.

    Raises:
        InputError: a key isn't text, or two paths read the same.
    """
    flat: dict[str, Leaf] = {}
    for key, value in nested.items():
        if not isinstance(key, str):
            raise InputError(f"the state has the key {key!r} under {prefix!r}; keys must be text.")
        is_inner = isinstance(value, dict)
        inner = leaves(value, f"{prefix}{key}.") if is_inner else {prefix + key: Leaf(nested, key)}
        if clash := flat.keys() & inner.keys():
            raise InputError(f"two entries of the state are named {min(clash)}; rename one.")
        flat.update(inner)
    return flat
