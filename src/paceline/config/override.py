"""Settings that a command line changes: "section.key=value"."""

from typing import Any

from paceline.config.errors import InputError
from paceline.config.files import parse_toml


def override(raw: dict[str, Any], text: str) -> None:
    """Apply one `--set` to raw data, in place.

    Args:
        text: "section.key=value", the value as in TOML; what is no TOML is text.

    Raises:
        InputError: it has another form.
    """
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text!r} is not of the form section.key=value.")
    section = raw
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise InputError(f"--set {text!r}: {key} is a value, not a section.")
    section[keys[-1]] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
