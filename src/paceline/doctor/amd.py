"""AMD's devices, read from `rocm-smi ... --json`.

Its keys changed their capitals over the years ("Card series", "Card Series"), so they are compared
without. Source: https://rocm.docs.amd.com/projects/rocm_smi_lib, python_smi_tools/rocm_smi.py.
"""

import re
from typing import Any

from pydantic import TypeAdapter

from paceline.config.files import parse_json
from paceline.doctor.nvidia import Driver, Gpu

_PRINTED = TypeAdapter(dict[str, dict[str, Any]])
_LINK = re.compile(r"\(topology\) link type between drm devices (\d+) and (\d+)")


def parse(text: str) -> tuple[Driver, tuple[Gpu, ...], frozenset[str]]:
    """Driver, devices, and the kinds of links between them (XGMI, PCIE).

    Raises:
        ValueError: that is no output of rocm-smi.
    """
    if "{" not in text:
        raise ValueError("rocm-smi.json is not what rocm-smi --json prints")
    found = parse_json(text[text.index("{") :], _PRINTED)
    parts = {name: {k.lower(): str(v) for k, v in its.items()} for name, its in found.items()}
    system = parts.get("system", {})
    cards = [
        (int(name[4:]), its) for name, its in parts.items() if re.fullmatch(r"card\d{1,6}", name)
    ]
    gpus = tuple(_gpu(index, its) for index, its in sorted(cards, key=lambda each: each[0]))
    kinds = frozenset(kind for key, kind in system.items() if _LINK.fullmatch(key))
    return Driver(system.get("driver version", "")), gpus, kinds


def _gpu(index: int, its: dict[str, str]) -> Gpu:
    return Gpu(
        index=index,
        name=its.get("card series", "unknown"),
        maker="amd",
        memory_bytes=_whole(its.get("vram total memory (b)")),
        used_bytes=_whole(its.get("vram total used memory (b)")),
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
