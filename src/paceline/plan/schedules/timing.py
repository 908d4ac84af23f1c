"""When each action of a pipeline schedule runs, given what each costs.

A rank does its actions in order, each as soon as what it needs is there: F needs the output of the
stage before, B and I the rank's own F and the gradient from the stage behind, W the I. What comes
from another rank arrives p2p_s after it was made; transfers run beside the computing and never
wait for each other. Nothing else is modelled: no memory, no contention, no host.

The published formulas stand beside, to be compared with.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from paceline.config.schedule import DEMANDS, Action, Schedule

Product = tuple[str, int, int]
"""What an action makes for others: ("F" or "I", stage, micro-batch); a B makes an "I" too."""


class Cost(NamedTuple):
    """Seconds that the work of each stage takes, per micro-batch; B takes what I and W take."""

    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    p2p_s: float = 0.0
    """From the end of an action to when another rank has its result."""

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        stage = action.stage
        if action.kind == "F":
            return self.forward_s[stage]
        split = {"I": self.input_grad_s[stage], "W": self.weight_grad_s[stage]}
        return split.get(action.kind, sum(split.values()))


class Timed(NamedTuple):
    """An action and when it runs."""

    action: Action
    start_s: float
    end_s: float


def equal_cost(
    num_stages: int,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
    p2p_s: float = 0.0,
) -> Cost:
    """The cost of stages that all weigh the same."""
    forward, input_grad, weight_grad = (
        (seconds,) * num_stages for seconds in (forward_s, input_grad_s, weight_grad_s)
    )
    return Cost(forward, input_grad, weight_grad, p2p_s)


def needs(action: Action, num_stages: int) -> list[Product]:
    """What must have been made before an action can start."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    behind = [("I", stage + 1, micro_batch)] if stage + 1 < num_stages else []
    return [("F", stage, micro_batch), *behind]


def execute(schedule: Schedule, cost: Cost) -> list[list[Timed]]:
    """Run the ranks' lists as far as they go; what is stuck is missing from the result."""
    made: dict[Product, tuple[int, float]] = {}  # rank and time
    timed: list[list[Timed]] = [[] for _ in schedule.actions]

    def advance(rank: int) -> bool:
        """Do one more action of a rank, if what it needs is there."""
        done, todo = timed[rank], schedule.actions[rank]
        if len(done) == len(todo):
            return False
        action = todo[len(done)]
        needed = [made.get(product) for product in needs(action, schedule.num_stages)]
        start_s = done[-1].end_s if done else 0.0
        for product in needed:
            if product is None:
                return False
            maker, at_s = product
            start_s = max(start_s, at_s if maker == rank else at_s + cost.p2p_s)
        end_s = start_s + cost.of(action)
        done.append(Timed(action, start_s, end_s))
        if action.kind != "W":
            made["F" if action.kind == "F" else "I", action.stage, action.micro_batch] = rank, end_s
        return True

    _until_all_stop(advance, schedule.num_ranks)
    return timed


def _until_all_stop(advance: Callable[[int], bool], num_ranks: int) -> None:
    moving = True
    while moving:
        moving = False
        for rank in range(num_ranks):
            while advance(rank):
                moving = True


def timeline(schedule: Schedule, cost: Cost) -> list[list[Timed]]:
    """Per rank, its actions with their times. Raises ValueError where the ranks deadlock."""
    timed = execute(schedule, cost)
    if [len(row) for row in timed] != [len(actions) for actions in schedule.actions]:
        raise ValueError(
            f"the ranks of schedule {schedule.name!r} deadlock: see what `check` says."
        )
    return timed


def makespan(schedule: Schedule, cost: Cost) -> float:
    """Seconds from the start of the first action to the end of the last, over all ranks."""
    return max(timed.end_s for timed in chain(*timeline(schedule, cost)))


def bubble_fraction(schedule: Schedule, cost: Cost) -> float:
    """Seconds of a step beyond the busiest rank's own work, as a fraction of the latter."""
    busy_s = max(sum(cost.of(action) for action in actions) for actions in schedule.actions)
    return makespan(schedule, cost) / busy_s - 1


def bubble_fraction_published(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
) -> float:
    """Bubble over ideal time by the published formula, from one stage's seconds per micro-batch.

    A step is taken to be synchronous: it ends when the last rank ends, as it does where gradients
    are clipped by their global norm. What the formulas hold for, and where our lists meet them:

    - gpipe, 1f1b: (p-1)(F+I+W); any costs, any number m of micro-batches.
    - interleaved: the same seconds per stage, a stage being 1/v of a rank's layers; any costs.
    - zb_h1, interleaved_zb: (p-1)(F+I-W); F and I at least W, m at least p.
    - zbv: its paper counts none for F = I = W, since there each rank starts its next step when it
      is done itself (the optimizer's check comes later). A synchronous step waits for the last
      rank to get its first input: (p-1)F. F = I = W, m at least 2p-1.
    - dualpipev: (p-1)(F&B + B - 3W), where F&B, the time of a forward beside a backward pass, is
      taken to be F+I+W: no overlap. The formula is for pairs that overlap; run one after the
      other, our list waits (p-1)F, half of it, where F = I = W and m is at least 2p.
    - dualpipe: the same with p/2 for p; m at least 2p.
    """
    whole_s = forward_s + input_grad_s + weight_grad_s
    ranks_waited_for = num_ranks // DEMANDS[name].num_directions - 1
    if name in ("gpipe", "1f1b", "interleaved"):
        wait_s = whole_s
    elif name in ("zb_h1", "interleaved_zb"):
        wait_s = forward_s + input_grad_s - weight_grad_s
    elif name == "zbv":
        wait_s = forward_s
    else:
        wait_s = whole_s + input_grad_s - 2 * weight_grad_s
    stages_passed = stages_per_rank / DEMANDS[name].num_directions
    return ranks_waited_for * wait_s / (num_micro_batches * stages_passed * whole_s)


def picture(schedule: Schedule) -> str:
    """The schedule drawn as text, a line per rank, every F, I and W as long as the others.

    Numbers are micro-batches; capitals are the first, third... stage of the rank (`stages_of`),
    small letters the second, fourth...
    """
    rows = timeline(schedule, equal_cost(schedule.num_stages))
    return "\n".join(_drawn(schedule, rank, row) for rank, row in enumerate(rows))


def _drawn(schedule: Schedule, rank: int, row: list[Timed]) -> str:
    stages = schedule.stages_of(rank)
    line = f"rank {rank} |"
    margin = len(line)
    for action, start_s, end_s in row:
        place = (schedule.direction(action.micro_batch), action.stage)
        kind = action.kind.lower() if stages.index(place) % 2 else action.kind
        line = line.ljust(margin + 3 * int(start_s)) + f"{kind}{action.micro_batch}"
        line = line.ljust(margin + 3 * int(end_s) - 1, "-") + " "
    return line.rstrip()
