"""The programs that a pipeline's ranks execute: pure functions, no processes."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config.schedule import DEMANDS, Action, Schedule
from paceline.parallel.pp.program import common_order, lower, lower_forward
from paceline.plan.schedules import build_schedule

CASES = [
    (name, num_ranks, num_micro_batches)
    for name in DEMANDS
    for num_ranks in (2, 4)
    for num_micro_batches in (num_ranks, 2 * num_ranks)
]


def scheduled(name: str, num_ranks: int, num_micro_batches: int) -> Schedule:
    stages_per_rank = DEMANDS[name].stages_per_rank or 2
    return build_schedule(name, num_ranks, num_micro_batches, stages_per_rank)


def play(programs: Sequence[Sequence[Any]], peers: Any) -> None:
    """Execute programs where every transfer blocks both sides until they meet."""
    todo = [deque(program) for program in programs]
    while any(todo):
        before = sum(map(len, todo))
        for rank, program in enumerate(todo):
            while program and "_" not in kind(program[0]):
                program.popleft()
            if program and kind(program[0]) == "REDUCE_GRAD":
                program.popleft()
            if program and kind(program[0]).startswith("SEND"):
                other, op = peers(rank, program[0])
                if todo[other] and str(todo[other][0]) == op:
                    program.popleft()
                    todo[other].popleft()
        heads = [str(program[0]) for program in todo if program]
        assert sum(map(len, todo)) < before, f"{heads} wait for each other"


def kind(op: Any) -> str:
    return op.computation_type.value


def peers_of(schedule: Schedule) -> Any:
    n = schedule.num_stages

    def peer(rank: int, op: Any) -> tuple[int, str]:
        step = 1 if kind(op) == "SEND_F" else -1
        index = op.stage_index
        stage = index if index < n else 2 * n - 1 - index
        other = index + step if index < n else index - step
        owner = schedule.rank_of(stage + step, op.microbatch_index)
        return owner, f"{other}{kind(op).replace('SEND', 'RECV')}{op.microbatch_index}"

    return peer


@pytest.mark.parametrize(("name", "num_ranks", "num_micro_batches"), CASES)
def test_programs_never_block_each_other_even_if_every_transfer_blocks(
    name, num_ranks, num_micro_batches
):
    schedule = scheduled(name, num_ranks, num_micro_batches)
    play([lower(schedule, rank) for rank in range(num_ranks)], peers_of(schedule))
    for number in (1, 3, num_micro_batches):
        schedule = schedule._replace(num_micro_batches=number)
        play([lower_forward(schedule, number, r) for r in range(num_ranks)], peers_of(schedule))


@pytest.mark.parametrize("name", DEMANDS)
def test_program_keeps_the_ranks_own_order(name):
    schedule = scheduled(name, 4, 8)
    for rank, actions in enumerate(schedule.actions):
        program = [op for op in lower(schedule, rank) if kind(op) in "FBIW"]
        assert [(kind(op), op.microbatch_index) for op in program] == [
            (action.kind, action.micro_batch) for action in actions
        ]


def test_gradients_are_reduced_once_behind_all_backward_passes_of_the_stage():
    program = [str(op) for op in lower(scheduled("zbv", 2, 4), 1)]
    for index in (1, 2):
        reduce = program.index(f"{index}REDUCE_GRAD")
        assert all(f"{index}{last}" not in "".join(program[reduce:]) for last in "BIW")
        assert program.count(f"{index}REDUCE_GRAD") == 1
    assert program[:2] == ["1UNSHARD", "2UNSHARD"]
    assert program[-2:] == ["1RESHARD", "2RESHARD"]


def test_passes_that_gather_for_themselves_need_nothing_gathered_before():
    schedule = scheduled("zbv", 2, 4)
    kept, freed = (lower(schedule, 1, keeps_gathered=keeps) for keeps in (True, False))
    assert freed == [op for op in kept if kind(op) not in ("UNSHARD", "RESHARD")]
    assert len(lower_forward(schedule, 3, 1)) - 4 == len(
        lower_forward(schedule, 3, 1, keeps_gathered=False)
    )


def test_neighbours_on_one_rank_exchange_nothing():
    program = [str(op) for op in lower(scheduled("zbv", 2, 4), 1)]
    assert not [op for op in program if op.startswith(("1SEND_F", "2RECV_F", "2SEND_B", "1RECV_B"))]


def test_lists_that_wait_for_each_other_are_an_error():
    first = (Action("F", 0, 0), Action("B", 0, 0))
    second = (Action("B", 1, 0), Action("F", 1, 0))
    stuck = Schedule("own", 1, (first, second[:1] * 2), ((0, 1),))
    common_order(stuck)  # F before B on one rank is the business of `check`
    waiting = Schedule("own", 2, (first, (Action("F", 1, 1), *second)), ((0, 1),))
    with pytest.raises(ValueError, match="1F1 wait for each other"):
        common_order(waiting)
