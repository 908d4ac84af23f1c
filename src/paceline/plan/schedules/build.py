"""The named pipeline schedules, each a pure function to a list of actions per rank.

Two shapes cover all eight names:

- Looped: stage s lives on rank s % p, and rank r does some forward passes to warm up, then one
  forward, one backward in turn, then the backward passes that remain. How many warm it up, and how
  long weight gradients wait, is all that tells GPipe (https://arxiv.org/abs/1811.06965), 1F1B
  (https://arxiv.org/abs/2006.09503), interleaved 1F1B (https://arxiv.org/abs/2104.04473), ZB-H1 and
  its interleaved form (https://arxiv.org/abs/2401.10241) apart.
- V: rank r holds stages r and 2p-1-r, so the last stage sits where the first does and backward
  passes start at once where forward passes end: ZBV (https://arxiv.org/abs/2405.15362) and
  DualPipeV (https://github.com/deepseek-ai/DualPipe). DualPipe (https://arxiv.org/abs/2412.19437)
  is DualPipeV unfolded: two V's of half the ranks, in opposite directions over one pipeline.

Stage 0 never splits its backward pass: nobody waits for the gradient of its input, and all lists
have its W right behind its I.

The V lists have a phase for every part of a full pipeline. With fewer micro-batches the list of a
full one is made and the micro-batches that aren't there are left out, which keeps it in order.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from paceline.config.errors import InputError
from paceline.config.schedule import DEMANDS, Action, Kind, Schedule, refusal

_Actions = tuple[tuple[Action, ...], ...]


def build_schedule(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int
) -> Schedule:
    """The list of a named schedule (`ScheduleName`) for a pipeline of num_ranks.

    Raises InputError where the schedule can't run with these numbers.
    """
    if name not in _BUILDERS:
        raise InputError(
            f'schedule "{name}" is not known: use one of {", ".join(sorted(_BUILDERS))}.'
        )
    sentence = refusal(name, num_ranks, stages_per_rank, num_micro_batches)
    if sentence is not None:
        raise InputError(sentence)
    actions = _BUILDERS[name](num_ranks, num_micro_batches, stages_per_rank)
    owners = _stage_ranks(name, num_ranks, stages_per_rank)
    return Schedule(name, num_micro_batches, actions, owners)


def _stage_ranks(name: str, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    there = tuple(range(num_ranks))
    if DEMANDS[name].num_directions == 2:
        return there, there[::-1]
    if name in ("zbv", "dualpipev"):
        return (there + there[::-1],)
    return (there * stages_per_rank,)


# ---- looped ------------------------------------------------------------------------------------


def _gpipe(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """All forward passes, then all backward passes."""
    return _looped(num_ranks, num_micro_batches, 1, lambda rank: num_micro_batches)


def _1f1b(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """As many forward passes ahead as there are ranks behind: the least that keeps them busy."""
    return _looped(num_ranks, num_micro_batches, 1, lambda rank: num_ranks - 1 - rank)


def _interleaved(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """Twice as far ahead: a forward pass returns from the last rank while others go out."""
    ahead = (stages_per_rank - 1) * num_ranks
    return _looped(
        num_ranks,
        num_micro_batches,
        stages_per_rank,
        lambda rank: ahead + 2 * (num_ranks - 1 - rank),
    )


def _zb_h1(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """1F1B whose rank r puts off weight gradients by r micro-batches, to fill the bubble at the
    end; so every rank holds as many activations as 1F1B's first."""
    return _interleaved_zb(num_ranks, num_micro_batches, 1)


def _interleaved_zb(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    ahead = (stages_per_rank - 1) * num_ranks
    return _looped(
        num_ranks,
        num_micro_batches,
        stages_per_rank,
        lambda rank: ahead + num_ranks - 1 - rank,
        split=True,
    )


def _looped(
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int,
    warm_up: Callable[[int], int],
    split: bool = False,
) -> _Actions:
    """The list of every rank, given how many forward passes warm it up.

    split: the backward pass is I, and its W follows r backward passes later on rank r.
    """
    work = num_micro_batches * stages_per_rank

    def nth(kind: Kind, n: int, rank: int) -> Action:
        """Micro-batches go in rounds of num_ranks, each round through all stages of the rank."""
        if stages_per_rank == 1:
            return Action(kind, rank, n)
        rounds, place = divmod(n, num_ranks)
        turn, chunk = divmod(rounds, stages_per_rank)
        if kind != "F":
            chunk = stages_per_rank - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, turn * num_ranks + place)

    def actions(rank: int) -> Iterator[Action]:
        ahead = min(warm_up(rank), work)
        for n in range(work + ahead):
            if n < work:
                yield nth("F", n, rank)
            if n >= ahead:
                yield nth("I" if split else "B", n - ahead, rank)
                if split and n - ahead >= rank:
                    yield nth("W", n - ahead - rank, rank)
        if split:
            yield from (nth("W", n, rank) for n in range(max(0, work - rank), work))

    return tuple(tuple(_first_stage_whole(actions(rank))) for rank in range(num_ranks))


# ---- V-shaped ----------------------------------------------------------------------------------
# A rank's list is written as phases of repeated steps: "F0" is the next forward pass of the first
# stage of the rank, "I1" the next input gradient of its second.


def _zbv(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """Memory of 1F1B, and no bubble but the fill where F, I and W take equally long."""

    def phases(rank: int, full: int) -> list[str]:
        behind = num_ranks - rank
        return [
            *["F0"] * (2 * behind - 1),
            *["F1", "F0"] * rank,
            *["F1", "I1", "W1"] * behind,
            *["F0", "I0", "W0", "F1", "I1", "W1"] * (full - 2 * num_ranks + rank + 1),
            *["I0", "W0", "F1", "I1", "W1"] * (behind - 1),
            *["I0", "I1"] * rank,
            *["I0", "W0"] * behind,
            *["W1"] * rank,
            *["W0"] * rank,
        ]

    return _v_shaped(num_ranks, num_micro_batches, 2 * num_ranks - 1, phases)


def _dualpipev(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """Forward of one stage next to backward of the other, so that a device that can run both at
    once overlaps the traffic of either; backward passes are split only at the ends."""

    def phases(rank: int, full: int) -> list[str]:
        behind = num_ranks - rank - 1
        last = ["B1", "B0"] * (rank + 1)
        return [
            *["F0"] * (2 * behind),
            *["F0", "F1"] * (rank + 1),
            *["I1", "W1", "F1"] * behind,
            *["F0", "B1", "F1", "B0"] * (full - 2 * num_ranks + rank + 1),
            *["B1", "F1", "B0"] * behind,
            *last[: rank + 1],
            *_put_off_weights(last[rank + 1 :], behind),
        ]

    return _v_shaped(num_ranks, num_micro_batches, 2 * num_ranks, phases)


def _put_off_weights(backwards: list[str], behind: int) -> Iterator[str]:
    """The end of DualPipeV: split passes, whose W fill the waits for the ranks behind."""
    waiting = deque(step[1] for step in backwards)
    yield from (f"I{chunk}" for chunk in waiting)
    for _ in range(behind):
        if waiting:
            yield f"W{waiting.popleft()}"
        yield "I0"
        waiting.append("0")
    yield from (f"W{chunk}" for chunk in waiting)


def _dualpipe(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> _Actions:
    """DualPipeV of half the ranks and micro-batches, unfolded: the V's rank r is ranks r and
    p-1-r, each of which does the outward half for one direction, the way back for the other."""
    half_ranks, half = num_ranks // 2, num_micro_batches // 2
    folded = _dualpipev(half_ranks, half, 2)

    def unfolded(rank: int) -> Iterator[Action]:
        mirror = rank >= half_ranks
        for kind, stage, micro_batch in folded[num_ranks - 1 - rank if mirror else rank]:
            direction = (stage >= half_ranks) != mirror
            yield Action(kind, stage, micro_batch + half * direction)

    return tuple(tuple(unfolded(rank)) for rank in range(num_ranks))


def _v_shaped(
    num_ranks: int,
    num_micro_batches: int,
    least: int,
    phases: Callable[[int, int], list[str]],
) -> _Actions:
    """Lists from phases that suppose at least so many micro-batches; the surplus is left out."""
    full = max(num_micro_batches, least)

    def actions(rank: int) -> Iterator[Action]:
        numbered = _numbered(phases(rank, full), (rank, 2 * num_ranks - 1 - rank))
        kept = (action for action in numbered if action.micro_batch < num_micro_batches)
        return _first_stage_whole(kept)

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))


def _numbered(steps: Iterable[str], stages: tuple[int, int]) -> Iterator[Action]:
    """Every kind of action of a stage takes the micro-batches in turn; a B is an I and a W."""
    done: Counter[str] = Counter()
    for step in steps:
        kind, chunk = cast(Kind, step[0]), step[1]
        counted = "I" + chunk if kind == "B" else step
        yield Action(kind, stages[int(chunk)], done[counted])
        done[counted] += 1
        done["W" + chunk] += kind == "B"


def _first_stage_whole(actions: Iterable[Action]) -> Iterator[Action]:
    for action in actions:
        if action.stage != 0 or action.kind in ("F", "B"):
            yield action
        elif action.kind == "I":
            yield action._replace(kind="B")


_BUILDERS: dict[str, Callable[[int, int, int], _Actions]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb_h1": _zb_h1,
    "interleaved_zb": _interleaved_zb,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
    "dualpipe": _dualpipe,
}
