"""Show: the answer about serving on a terminal and as plain data. Nothing is worked out here."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from paceline.plan.serving.load import KINDS
from paceline.plan.serving.search import Asked, Fleet, Rent, ServingAnswer
from paceline.render.figures import amount_text, milliseconds, share_text
from paceline.render.table import Pairs, Table, heading

_PARTS = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}
_MOST_LOST = 12
_NOT_KNOWN = "?"


def show(
    found: ServingAnswer,
    asked: Asked,
    console: Console,
    num: int,
) -> None:
    """Print the answer with the `num` cheapest fleets."""
    for part in _parts(found, asked, num):
        console.print(part)


def _parts(found: ServingAnswer, asked: Asked, num: int) -> Iterator[RenderableType]:
    yield Text(
        f"{asked.rate:g} requests/s of {_range(asked.num_in)} tokens in and "
        f"{_range(asked.num_out)} out; {asked.slo}; {asked.num_requests} requests simulated",
        style="dim",
    )
    if found.fleets:
        best = found.fleets[0]
        limits = best.engine.limits
        yield heading(
            f"{best.replicas} x {best.engine.device}: {limits.max_sequences} texts at a time, "
            f"passes of {limits.max_tokens} tokens"
        )
        yield Pairs(_about(best))
        yield heading("fleets that keep to it, the cheapest first")
        yield _fleets(found.fleets[:num])
    if found.rent is not None:
        yield heading("rent, or pay an API")
        yield Text(_rent_text(found.rent, found.fleets[0]))
    if found.lost:
        yield heading("why others lose")
        rows = [(one.device, " ".join(one.batches) or "any", one.why) for one in found.lost]
        more = len(rows) - _MOST_LOST
        note = f"and {more} more (--json)" if more > 0 else ""
        yield Table(("", "texts/pass", ""), rows[:_MOST_LOST], words=(0, 1, 2), note=note)


def _about(best: Fleet) -> list[tuple[str, str]]:
    ran = best.simulated
    rows = [
        (
            f"{kind.upper()}, ms",
            ", ".join(
                f"{name} {milliseconds(ran.served.percentile(kind, part))}"
                for name, part in _PARTS.items()
            ),
        )
        for kind in KINDS
    ]
    usd = best.usd_per_million
    if usd is not None:
        rows.append(("USD per million tokens", f"{usd[0]:.3g} in, {usd[1]:.3g} out"))
    limits = best.engine.limits
    shares = [f"{name} {share_text(s / ran.terms.total)}" for name, s in _terms(best).items() if s]
    return [
        *rows,
        (
            "tokens/s",
            f"{amount_text(best.replicas * ran.served.tokens_per_s)} made by all replicas",
        ),
        ("a step's time", ", ".join(shares)),
        ("busy", f"{share_text(ran.busy)} of the time; {share_text(_prefill(best))} for prompts"),
        ("blocks", f"{ran.most_blocks:,} of {limits.num_blocks:,} in use at most"),
        ("preemptions", f"{ran.num_preemptions:,}"),
        ("times are", best.engine.source),
    ]


def _fleets(fleets: Sequence[Fleet]) -> Table:
    rows = []
    for fleet in fleets:
        served, usd = fleet.simulated.served, fleet.usd_per_million
        engine = fleet.engine
        rows.append(
            (
                engine.cluster.device.name,
                f"{fleet.replicas} x {engine.tp}",
                engine.form,
                f"{engine.limits.max_sequences}",
                f"{engine.limits.max_tokens}",
                milliseconds(served.percentile("ttft", 0.95)),
                milliseconds(served.percentile("tpot", 0.95)),
                share_text(fleet.simulated.busy),
                _NOT_KNOWN if fleet.usd_per_hour is None else f"{fleet.usd_per_hour:.2f}",
                _NOT_KNOWN if usd is None else f"{usd[0]:.3g}, {usd[1]:.3g}",
            )
        )
    heads = (
        "device", "replicas x tp", "", "texts", "pass", "TTFT 95 %", "TPOT 95 %", "busy",
        "USD/h", "USD/M in, out",
    )  # fmt: skip
    return Table(heads, rows, words=(0, 2), strong=0)


def _rent_text(rent: Rent, best: Fleet) -> str:
    one = best.engine.usd_per_hour or 0.0
    asked = (
        f"The API costs {rent.api_usd_per_hour:.2f} USD/h at this rate, renting "
        f"{best.usd_per_hour or 0.0:.2f}."
    )
    if rent.pays_from is None:
        return (
            f"{asked} Renting never pays: a replica costs {one:.2f} USD/h and serves at most "
            f"{rent.most_rate:.3g} requests/s."
        )
    share = share_text(rent.pays_from / rent.most_rate)
    return (
        f"{asked} Renting pays from {rent.pays_from:.3g} requests/s on, {share} of what one "
        "replica serves."
    )


def to_json(found: ServingAnswer, asked: Asked) -> dict[str, Any]:
    """The answer as plain data."""
    return {
        "rate": asked.rate,
        "slo": asked.slo.limits | {"share": asked.slo.share},
        "fleets": [_fleet_json(fleet) for fleet in found.fleets],
        "lost": [vars(one) for one in found.lost],
        "rent": None if found.rent is None else vars(found.rent),
    }


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    ran, limits = fleet.simulated, fleet.engine.limits
    return {
        "device": fleet.engine.cluster.device.name,
        "replicas": fleet.replicas,
        "tp": fleet.engine.tp,
        "form": fleet.engine.form,
        "max_sequences": limits.max_sequences,
        "max_tokens": limits.max_tokens,
        "num_blocks": limits.num_blocks,
        "most_blocks": ran.most_blocks,
        "preemptions": ran.num_preemptions,
        "busy": ran.busy,
        "tokens_per_s": fleet.replicas * ran.served.tokens_per_s,
        "usd_per_hour": fleet.usd_per_hour,
        "usd_per_million": fleet.usd_per_million,
        "terms_s": _terms(fleet),
        **{
            f"{kind}_s": {name: ran.served.percentile(kind, part) for name, part in _PARTS.items()}
            for kind in KINDS
        },
    }


def _terms(fleet: Fleet) -> dict[str, float]:
    return fleet.simulated.terms._asdict()


def _prefill(fleet: Fleet) -> float:
    return fleet.simulated.prefill_s / fleet.simulated.terms.total


def _range(given: tuple[int, int]) -> str:
    return f"{given[0]:,}" if given[0] == given[1] else f"{given[0]:,} to {given[1]:,}"
