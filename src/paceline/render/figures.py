"""Figures as text: a number with its unit, as people read it on a terminal or a page.

None is a figure that nobody knows.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime


def time_text(seconds: float | None) -> str:
    """A time of a step's order to three digits, in s or ms."""
    if seconds is None:
        return "unknown"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def short_time_text(seconds: float) -> str:
    """A time to three digits, in us where it is below a millisecond."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else time_text(seconds)


def milliseconds(seconds: float) -> str:
    """Without the unit: to a tenth, small ones to three digits."""
    value = seconds * 1e3
    return f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """A duration in its two leading units."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def date_text(unix_s: float) -> str:
    """A moment to the minute, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def bytes_text(count: float | None) -> str:
    """Bytes to three digits in powers of 1000, as datasheets of devices count them."""
    if count is None:
        return "unknown"
    power = min(6, int(math.log10(max(count, 1.0)) // 3))
    # Three digits may round up into the next unit: 999.9 MB is 1 GB.
    power += power < 6 and count / 1000**power >= 999.5
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power]}"


def buffer_text(num_bytes: float) -> str:
    """The size of a buffer in binary units: 4 KiB."""
    number, unit = num_bytes, "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"


def flops_text(flops_per_s: float) -> str:
    """Arithmetic per second to three digits."""
    factor, unit = (1e12, "TFLOP/s") if flops_per_s >= 9.995e11 else (1e9, "GFLOP/s")
    value = flops_per_s / factor
    return f"{value:,.1f} {unit}" if value < 99.95 else f"{value:,.0f} {unit}"


def amount_text(value: float | None) -> str:
    """Thousands separated; three digits where it is small."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count_text(value: float) -> str:
    """A large count in words of three digits: 6.74 billion."""
    for power, word in ((12, "trillion"), (9, "billion"), (6, "million")):
        if value >= 0.9995 * 10**power:
            digits = max(0, 2 - int(f"{value / 10**power:.2e}"[-2:]))
            return f"{value / 10**power:.{digits}f} {word}"
    return f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """A part of a whole, 0 to 1, in per cent to a tenth."""
    return "unknown" if share is None else f"{share:.1%}"


def mfu_text(mfu: float | None) -> str:
    """MFU in per cent, or that it can't be told."""
    return "MFU: peak unknown" if mfu is None else f"MFU {mfu:.1%}"


def loss_text(loss: float | None) -> str:
    """A loss to four digits."""
    return "not finite" if loss is None else f"{loss:.4g}"


def plural(count: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(parts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
