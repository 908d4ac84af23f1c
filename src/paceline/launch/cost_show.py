"""Show: costs of runs on a terminal, and as plain data; the page takes its words from here."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.launch.cost import Price, RunCost
from paceline.launch.ledger import CLASSES, AttemptLedger
from paceline.render.figures import amount_text, date_text, duration_text, plural, share_text
from paceline.render.table import Pairs, Table, share_bar

CLASS_NAMES: Mapping[str, str] = {
    "queued": "queued",
    "starting": "starting",
    "data_wait": "data wait",
    "compute": "compute",
    "exposed_comm": "exposed communication",
    "checkpoint_stall": "checkpoint stall",
    "lost_work": "lost work",
    "restart": "restart",
    "hang": "hang",
    "idle_held": "idle, held",
    "preempted": "preempted",
}
CLASS_COLOURS: Mapping[str, str] = {
    "queued": "#c9ccd1",
    "starting": "#0072b2",
    "data_wait": "#e2903a",
    "compute": "#009e73",
    "exposed_comm": "#8e63ce",
    "checkpoint_stall": "#d9b13b",
    "lost_work": "#d55e00",
    "restart": "#cc79a7",
    "hang": "#a83e5c",
    "idle_held": "#9aa1a9",
    "preempted": "#56b4e9",
}
_JOULES_OF_KWH = 3.6e6
_BAR = 16
_MOST_IDLE, MOST_ATTEMPTS = 5, 40


def device_time_text(device_us: int) -> str:
    """Device time as it is paid for: in device-hours, little in device-seconds."""
    hours = device_us / 3.6e9
    return f"{hours:,.1f} device-h" if hours >= 10 else f"{device_us / 1e6:,.1f} device-s"


def usd_text(usd: float | None) -> str:
    """USD to cents, small sums to three digits."""
    if usd is None:
        return "unknown"
    return f"{usd:,.2f} USD" if usd >= 1 or usd == 0 else f"{usd:.3g} USD"


def headline(one: RunCost) -> str:
    """What a run cost, in a sentence."""
    found = one.ledger
    cost = "" if one.usd is None else f"{usd_text(one.usd)}, "
    attempts = plural(len(found.attempts), "attempt")
    return (
        f"{one.name}: {cost}{device_time_text(found.held_us)} in {attempts}, "
        f"goodput {share_text(found.goodput)}."
    )


def class_rows(one: RunCost) -> list[tuple[str, str, str, str]]:
    """Key, device time, share and USD of each class."""
    found = one.ledger
    return [
        (
            name,
            device_time_text(us),
            share_text(us / found.total_us),
            "–" if one.price is None or name == "queued" else usd_text(one.price.of(us)),
        )
        for name, us in found.device_us.items()
    ]


def got_rows(one: RunCost) -> list[tuple[str, str]]:
    """What was got for it, and what it was expected to cost."""
    rows = [("kept steps", _each(one, one.num_steps, "a step"))]
    if one.num_lost_steps:
        rows.append(("steps done again", f"{one.num_lost_steps:,}"))
    if one.num_units:
        million = one.num_units / 1e6
        each = "" if one.per(million) is None else f", {usd_text(one.per(million))} a million"
        rows.append((one.unit, f"{one.num_units:,}{each}"))
    if one.num_epochs is not None:
        rows.append(("epochs", _each(one, one.num_epochs, "an epoch")))
    if one.num_checkpoints:
        rows.append(("checkpoints kept", _each(one, one.num_checkpoints, "a checkpoint")))
    if one.ledger.goodput is not None:
        rows.append(("goodput", f"{share_text(one.ledger.goodput)} of what was held"))
    if one.ledger.effective_ratio is not None:
        ratio = share_text(one.ledger.effective_ratio)
        rows.append(("effective training time", f"{ratio} of the time since the first submission"))
    if one.planned_us is not None:
        usd = "" if one.planned_usd is None else f", {usd_text(one.planned_usd)}"
        steps = plural(one.num_steps, "step")
        rows.append(("the plan's", f"{device_time_text(one.planned_us)}{usd} for {steps}"))
    rows.extend(_energy_rows(one))
    if one.price is not None:
        rows.append(("price", f"{one.price.usd:g} USD a device-hour ({one.price.source})"))
    return rows


def _energy_rows(one: RunCost) -> Iterator[tuple[str, str]]:
    """What it took, and what of that nobody counted."""
    if one.energy is None:
        return
    parts = {"devices": one.energy.devices_j, "processors and memory": one.energy.hosts_j}
    known = {name: joules for name, joules in parts.items() if joules is not None}
    if known:
        told = ", ".join(f"{name} {_kwh_text(joules)}" for name, joules in known.items())
        counts = {"step": one.num_steps, one.unit.removesuffix("s"): one.num_units}
        each = [
            f"{amount_text(joules)} J a {name}"
            for name, count in counts.items()
            if (joules := one.joules_per(count)) is not None
        ]
        whole = "" if len(known) == 1 else f"{_kwh_text(sum(known.values()))}: "
        yield "energy", ", ".join([f"{whole}{told}", *each])
    if one.energy.missing:
        yield "energy not counted", "; ".join(one.energy.missing)


def _kwh_text(joules: float) -> str:
    return f"{amount_text(joules / _JOULES_OF_KWH)} kWh"


def _each(one: RunCost, count: float, each: str) -> str:
    usd = one.per(count)
    return amount_text(count) + ("" if usd is None else f", {usd_text(usd)} {each}")


def attempt_row(one: AttemptLedger, price: Price | None) -> tuple[str, ...]:
    """Number, moment, devices, times, state and USD of an attempt."""
    attempt = one.attempt
    return (
        str(attempt.number),
        date_text(one.begin_us / 1e6).removesuffix(" UTC"),
        str(attempt.num_devices),
        duration_text((one.start_us - one.begin_us) / 1e6),
        duration_text((one.end_us - one.start_us) / 1e6),
        attempt.state if attempt.exit_code is None else f"{attempt.state} ({attempt.exit_code})",
        "–" if price is None else usd_text(price.of(one.held_us)),
    )


ATTEMPT_HEADS = ("no.", "submitted, UTC", "devices", "queued", "held", "state", "cost")
ATTEMPT_WORDS = (1, 5)


def idle_sentences(one: RunCost) -> list[str]:
    """Where devices were held for nothing, the longest first."""
    found = one.ledger.idle
    told = []
    for idle in found[:_MOST_IDLE]:
        length_s = (idle.end_us - idle.begin_us) / 1e6
        usd = "" if one.price is None else f", {usd_text(one.price.of(idle.device_us))}"
        is_are = ("are" if idle.num_devices > 1 else "is") if idle.is_now else ""
        was = is_are or ("were" if idle.num_devices > 1 else "was")
        nodes = ", ".join(idle.attempt.nodes[:4]) + (", ..." if idle.attempt.nodes[4:] else "")
        told.append(
            f"{plural(idle.num_devices, 'device')} of attempt {idle.attempt.number}"
            f"{f' ({nodes})' if nodes else ''} {was} held and did nothing for "
            f"{duration_text(length_s)} from {date_text(idle.begin_us / 1e6)} on{usd}."
        )
    if len(found) > _MOST_IDLE:
        told.append(f"Shorter ones: {len(found) - _MOST_IDLE}.")
    return told


def to_json(one: RunCost) -> dict[str, Any]:
    """All of it as plain data; device time in microseconds, so that sums stay exact."""
    found = one.ledger
    return {
        "run": str(one.run.path),
        "device_us": {name: found.device_us.get(name, 0) for name in CLASSES},
        "total_us": found.total_us,
        "held_us": found.held_us,
        "goodput": found.goodput,
        "effective_ratio": found.effective_ratio,
        "usd": one.usd,
        "usd_per_device_hour": None if one.price is None else one.price.usd,
        "usd_per_step": one.per(one.num_steps),
        f"usd_per_{one.unit.removesuffix('s')}": one.per(one.num_units),
        "usd_per_epoch": one.per(one.num_epochs),
        "usd_per_checkpoint": one.per(one.num_checkpoints),
        "steps": one.num_steps,
        "steps_again": one.num_lost_steps,
        one.unit: one.num_units,
        "epochs": one.num_epochs,
        "checkpoints": one.num_checkpoints,
        "planned_us": one.planned_us,
        "planned_usd": one.planned_usd,
        "energy": None
        if one.energy is None
        else {
            "devices_j": one.energy.devices_j,
            "hosts_j": one.energy.hosts_j,
            "j_per_step": one.joules_per(one.num_steps),
            f"j_per_{one.unit.removesuffix('s')}": one.joules_per(one.num_units),
            "missing": list(one.energy.missing),
        },
        "attempts": [
            {
                "number": each.attempt.number,
                "submitted": each.attempt.submitted,
                "started": each.attempt.started,
                "ended": each.attempt.ended,
                "nodes": list(each.attempt.nodes),
                "num_devices": each.attempt.num_devices,
                "exit_code": each.attempt.exit_code,
                "state": each.attempt.state,
                "device_us": dict(each.device_us),
            }
            for each in found.attempts
        ],
        "idle": [
            {
                "attempt": each.attempt.number,
                "began": each.begin_us / 1e6,
                "ended": each.end_us / 1e6,
                "num_devices": each.num_devices,
                "is_now": each.is_now,
            }
            for each in found.idle
        ],
    }


# ---- the terminal --------------------------------------------------------------------------------


def show(one: RunCost, console: Console) -> None:
    """Print what a run cost."""
    console.print(Text(headline(one), style="bold"))
    if one.ledger.attempts:
        console.print(_classes(one))
        console.print()
        console.print(_attempts(one))
    console.print()
    console.print(Pairs(got_rows(one)))
    for sentence in idle_sentences(one):
        console.print(Text(sentence, style="yellow"))
    console.print()


def _classes(one: RunCost) -> Table:
    rows = []
    for name, *figures in class_rows(one):
        share = one.ledger.device_us[name] / one.ledger.total_us
        rows.append((CLASS_NAMES[name], *figures, share_bar(share, CLASS_COLOURS[name], _BAR)))
    whole = device_time_text(one.ledger.total_us)
    foot = ("all", whole, "100.0%", "–" if one.usd is None else usd_text(one.usd), "")
    return Table(("class", "device time", "share", "cost", ""), rows, words=(0, 4), foot=foot)


def _attempts(one: RunCost) -> Table:
    shown = one.ledger.attempts[-MOST_ATTEMPTS:]
    rows = [attempt_row(each, one.price) for each in shown]
    left = len(one.ledger.attempts) - len(shown)
    note = (
        f"{plural(left, 'earlier attempt')} {'is' if left == 1 else 'are'} left out."
        if left
        else ""
    )
    return Table(ATTEMPT_HEADS, rows, words=ATTEMPT_WORDS, note=note)


def together(costs: Sequence[RunCost]) -> Table:
    """A line for each of several runs."""
    rows = [
        (
            one.name,
            device_time_text(one.ledger.held_us),
            share_text(one.ledger.goodput),
            f"{one.num_steps:,}",
            usd_text(one.usd),
        )
        for one in costs
    ]
    known = [one.usd for one in costs]
    foot = (
        "all",
        device_time_text(sum(one.ledger.held_us for one in costs)),
        "",
        "",
        usd_text(None if None in known else sum(usd for usd in known if usd is not None)),
    )
    return Table(("run", "held", "goodput", "steps", "cost"), rows, foot=foot)
