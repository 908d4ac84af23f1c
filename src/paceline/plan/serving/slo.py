"""SLO: what a service promises about its times, and how much of a load keeps to it."""

import re
from dataclasses import dataclass

from paceline.config.errors import InputError
from paceline.plan.serving.load import Served

_PART = re.compile(r"(ttft|tpot|e2e)\s*<?\s*(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s)", re.ASCII)
_SHARE = re.compile(r"(\d{1,2}(?:\.\d{1,4})?|100)\s*%", re.ASCII)
_USUAL_SHARE = 0.95


@dataclass(frozen=True)
class Slo:
    """A request keeps to it if each of its times does; None: not promised."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = _USUAL_SHARE
    """Of the requests that must keep each of them."""

    def __str__(self) -> str:
        told = [f"{kind} {limit * 1e3:g} ms" for kind, limit in self.limits.items()]
        return f"{', '.join(told)} for {self.share:.4g} of requests" if told else "no promise"

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by kind, of those that are promised."""
        every = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {kind: limit for kind, limit in every.items() if limit is not None}

    def broken(self, served: Served) -> list[str]:
        """The kinds of time that too many requests exceed."""
        return [
            kind
            for kind, limit in self.limits.items()
            if served.percentile(kind, self.share) > limit
        ]

    def goodput(self, served: Served) -> float:
        """Requests a second that keep all it says."""
        return served.count_within(self.limits) / served.seconds if served.seconds else 0.0


def slo_of(text: str) -> Slo:
    """The SLO of a text like "ttft 500ms, tpot 40ms, 99 %".

    Raises:
        InputError: it can't be understood, or says the same twice, or nothing.
    """
    limits: dict[str, float] = {}
    share = None
    for part in text.lower().split(","):
        part = part.strip()
        if (found := _PART.fullmatch(part)) and f"{found[1]}_s" not in limits:
            limits[f"{found[1]}_s"] = float(found[2]) / (1e3 if found[3] == "ms" else 1)
        elif (found := _SHARE.fullmatch(part)) and share is None:
            share = float(found[1]) / 100
        else:
            limits.clear()
            break
    if not limits or not all(limits.values()) or share == 0:
        raise InputError(
            f'--slo {text[:200]!r} is not of the form "ttft 500ms, tpot 40ms, 99 %": ttft, tpot or '
            "e2e with a time in ms or s, and how many requests must keep to it (95 % if left out)."
        )
    return Slo(**limits, share=_USUAL_SHARE if share is None else share)
