"""Pipeline schedules. Pure functions: what is refused, what `check` finds, timing against the
published formulas, the split of layers against brute force, and the page that shows them.
tests/plan/test_schedules_torch.py compares the lists with torch's own.
"""

import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.published_bubbles import bubble_fraction_published
from paceline.config.errors import InputError
from paceline.config.schedule import (
    DEMANDS,
    Action,
    Schedule,
    refusal,
    smallest_micro_batches,
)
from paceline.plan.schedules import (
    ScheduleError,
    StageCost,
    build_schedule,
    check,
    equal_cost,
    makespan,
    split_layers,
    timeline,
)

PAGE = Path(__file__).parents[2] / "docs" / "techniques" / "pipeline.md"
SPLIT = ("zb_h1", "interleaved_zb", "zbv", "dualpipev", "dualpipe")


def per_rank(name: str) -> int:
    return DEMANDS[name].stages_per_rank or 2


def bubble_fraction(schedule: Schedule, cost: StageCost) -> float:
    """Seconds of a step beyond the busiest rank's own work, as a fraction of the latter."""
    busy_s = max(sum(cost.of(action) for action in actions) for actions in schedule.actions)
    return makespan(schedule, cost) / busy_s - 1


def draw_schedule(schedule: Schedule) -> str:
    """The schedule drawn as text, a line per rank, every F, I and W as long as the others.

    Numbers are micro-batches; capitals are the first, third... stage of the rank (`stages_of`),
    small letters the second, fourth...
    """
    rows = timeline(schedule, equal_cost(schedule.num_stages))
    return "\n".join(_drawn(schedule, rank, row) for rank, row in enumerate(rows))


def _drawn(schedule: Schedule, rank: int, row: list) -> str:
    stages = schedule.stages_of(rank)
    line = f"rank {rank} |"
    margin = len(line)
    for action, start_s, end_s in row:
        place = (schedule.direction(action.micro_batch), action.stage)
        kind = action.kind.lower() if stages.index(place) % 2 else action.kind
        line = line.ljust(margin + 3 * int(start_s)) + f"{kind}{action.micro_batch}"
        line = line.ljust(margin + 3 * int(end_s) - 1, "-") + " "
    return line.rstrip()


@st.composite
def shapes(draw):
    """(name, p, m, v) that is not refused."""
    name = draw(st.sampled_from(sorted(DEMANDS)))
    ranks = draw(st.integers(1, 9)) * DEMANDS[name].num_directions
    batches = draw(st.integers(1, 9)) * smallest_micro_batches(name, ranks)
    return name, ranks, batches, DEMANDS[name].stages_per_rank or draw(st.integers(2, 4))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            ("interleaved", 4, 2, 6),
            'layout.schedule = "interleaved" with layout.pp = 4 needs 4 micro-batches per step or '
            "a multiple of that, not 6: change train.global_batch or layout.micro_batch.",
        ),
        (
            ("interleaved_zb", 8, 3, 4),
            'layout.schedule = "interleaved_zb" with layout.pp = 8 needs 8 micro-batches per step '
            "or a multiple of that, not 4: change train.global_batch or layout.micro_batch.",
        ),
        (
            ("dualpipe", 4, 2, 5),
            'layout.schedule = "dualpipe" with layout.pp = 4 needs 2 micro-batches per step or a '
            "multiple of that, not 5: change train.global_batch or layout.micro_batch.",
        ),
        (
            ("dualpipe", 3, 2, 6),
            'layout.schedule = "dualpipe" needs an even layout.pp, not 3: change it or use '
            '"dualpipev".',
        ),
        (
            ("interleaved", 4, 1, 8),
            'layout.schedule = "interleaved" needs layout.stages_per_rank of 2 or more, not 1: '
            'raise it or use "1f1b".',
        ),
        (
            ("interleaved_zb", 4, 1, 8),
            'layout.schedule = "interleaved_zb" needs layout.stages_per_rank of 2 or more, not 1: '
            'raise it or use "zb_h1".',
        ),
        (
            ("zbv", 4, 1, 8),
            'layout.schedule = "zbv" needs layout.stages_per_rank = 2, not 1: set that.',
        ),
        (
            ("1f1b", 4, 2, 8),
            'layout.schedule = "1f1b" needs layout.stages_per_rank = 1, not 2: set that.',
        ),
    ],
)
def test_a_refusal_says_what_works(case, sentence):
    assert refusal(*case) == sentence
    name, ranks, stages, batches = case
    with pytest.raises(InputError, match=re.escape(sentence)):
        build_schedule(name, ranks, batches, stages)


def test_no_micro_batches_are_refused():
    assert "needs 1 micro-batches per step" in (refusal("1f1b", 4, 1, 0) or "")


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="not known: use one of 1f1b, dualpipe, dualpipev"):
        build_schedule("2f2b", 4, 8, 1)


@given(shapes())
def test_the_smallest_number_of_micro_batches_is_the_smallest(shape):
    name, ranks, _, stages = shape
    smallest = smallest_micro_batches(name, ranks)
    assert refusal(name, ranks, stages, smallest) is None
    assert all(refusal(name, ranks, stages, fewer) for fewer in range(smallest))


# ---- every list is sound -----------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(shapes())
def test_every_accepted_shape_gives_a_sound_list(shape):
    """`check` passes; memory is within what the schedule promises; times respect the data flow."""
    name, ranks, batches, stages = shape
    schedule = build_schedule(name, ranks, batches, stages)
    checked = check(schedule)
    promised = {
        "gpipe": batches,
        "1f1b": ranks,
        "interleaved": stages * ranks + ranks - 1,
        "zb_h1": ranks,
        "interleaved_zb": stages * ranks,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
        "dualpipe": ranks + 1,
    }[name]
    assert max(checked.peak_activations) <= min(promised, batches * stages)
    assert any(checked.peak_weight_grads_pending) <= (name in SPLIT)
    cost = equal_cost(schedule.num_stages, 3.0, 2.0, 1.0, p2p_s=0.5)
    for row in timeline(schedule, cost):
        assert all(before.end_s <= after.start_s for before, after in pairwise(row))
        assert all(timed.end_s - timed.start_s == cost.of(timed.action) for timed in row)


@settings(deadline=None, max_examples=100)
@given(shapes(), st.tuples(*[st.integers(1, 9)] * 4))
def test_no_action_starts_before_what_it_needs_has_arrived(shape, seconds):
    name, ranks, batches, stages = shape
    schedule = build_schedule(name, ranks, batches, stages)
    *work, p2p_s = seconds
    rows = timeline(schedule, equal_cost(schedule.num_stages, *work, p2p_s=p2p_s))
    ends = {
        ("I" if action.kind == "B" else action.kind, *action[1:]): (rank, end_s)
        for rank, row in enumerate(rows)
        for action, _, end_s in row
    }
    for rank, row in enumerate(rows):
        for (kind, stage, batch), start_s, _ in row:
            neighbour = {"F": ("F", stage - 1), "W": ("I", stage)}.get(kind, ("I", stage + 1))
            if (*neighbour, batch) in ends:
                maker, end_s = ends[*neighbour, batch]
                assert start_s >= end_s + (p2p_s if maker != rank else 0)
            if kind in "BI":
                assert start_s >= ends["F", stage, batch][1]


@given(shapes())
def test_stages_live_where_the_schedule_says(shape):
    name, ranks, batches, stages = shape
    schedule = build_schedule(name, ranks, batches, stages)
    directions = DEMANDS[name].num_directions
    assert schedule.num_stages == ranks * stages // directions
    for stage in range(schedule.num_stages):
        first = schedule.rank_of(stage, 0)
        if name in ("zbv", "dualpipev"):
            assert first == min(stage, 2 * ranks - 1 - stage)
        else:
            assert first == stage % ranks
        if directions == 2:
            assert schedule.rank_of(stage, batches - 1) == ranks - 1 - stage
            assert schedule.rank_of(stage, batches // 2) == ranks - 1 - stage


def test_dualpipe_is_the_same_from_both_ends():
    schedule = build_schedule("dualpipe", 6, 16, 2)
    for rank, actions in enumerate(schedule.actions):
        mirrored = [
            action._replace(micro_batch=(action.micro_batch + 8) % 16) for action in actions
        ]
        assert list(schedule.actions[5 - rank]) == mirrored


# ---- what check finds --------------------------------------------------------------------------


def edited(schedule: Schedule, rank: int, edit) -> Schedule:
    actions = [list(row) for row in schedule.actions]
    edit(actions[rank])
    return schedule._replace(actions=tuple(tuple(row) for row in actions))


def swap(one: str, other: str):
    """Exchange two actions of a rank, named as they print."""

    def edit(row: list[Action]) -> None:
        first, second = (list(map(str, row)).index(text) for text in (one, other))
        row[first], row[second] = row[second], row[first]

    return edit


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (1, lambda row: row.pop(), "rank 1, stage 1, micro-batch 3: W is missing"),
        (1, lambda row: row.pop(0), "rank 1, stage 1, micro-batch 0: F is missing"),
        (
            1,
            lambda row: row.append(row[0]),
            "rank 1, stage 1, micro-batch 0: F stands more than once",
        ),
        (
            1,
            lambda row: row.append(Action("B", 1, 0)),
            "micro-batch 0: the backward pass stands both whole (B) and split (I, W)",
        ),
        (
            0,
            lambda row: row.append(Action("W", 0, 2)),
            "micro-batch 2: the backward pass stands both whole (B) and split (I, W)",
        ),
        (1, swap("1I2", "1W2"), "micro-batch 2: F, W, I must be in the order F, I, W"),
        (0, swap("0F0", "0B0"), "micro-batch 0: B, F must be in the order F, B"),
        (0, lambda row: row.append(Action("F", 1, 0)), "rank 0 does 1F0, which is not its own"),
        (0, lambda row: row.append(Action("F", 0, 4)), "rank 0 does 0F4, which is not its own"),
        (0, lambda row: row.append(Action("F", 7, 0)), "rank 0 does 7F0, which is not its own"),
    ],
)
def test_check_names_what_is_wrong(rank, edit, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(edited(build_schedule("zb_h1", 2, 4, 1), rank, edit))


def test_check_says_who_waits_for_whom():
    """Rank 1 wants micro-batch 3 first, which rank 0 does after the gradient of the first."""
    schedule = edited(build_schedule("1f1b", 2, 4, 1), 1, swap("1F0", "1F3"))
    schedule = edited(schedule, 1, swap("1B0", "1B3"))
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "deadlock: rank 0 at 0B0 waits for the input gradient of stage 1, micro-batch 0, from "
        "rank 1; rank 1 at 1F3 waits for the output of stage 0, micro-batch 3, from rank 0."
    )
    with pytest.raises(ValueError, match="deadlock"):
        timeline(schedule, equal_cost(2))


def test_a_list_that_was_not_checked_is_not_timed_as_if_it_could_run():
    backward_first = edited(build_schedule("1f1b", 1, 1, 1), 0, swap("0F0", "0B0"))
    with pytest.raises(ValueError, match="deadlock"):
        timeline(backward_first, equal_cost(1))


def test_a_stage_on_the_wrong_rank_in_one_direction_is_found():
    schedule = build_schedule("dualpipe", 2, 4, 2)
    with pytest.raises(ScheduleError, match="rank 0 does 0F2, which is not its own"):
        check(schedule._replace(actions=schedule.actions[::-1]))


def test_ranks_without_stages_and_batches_that_do_not_halve_are_found():
    schedule = build_schedule("1f1b", 2, 4, 1)
    with pytest.raises(ScheduleError, match=r"live on ranks \[0, 1\], but there are lists for 3"):
        check(schedule._replace(actions=(*schedule.actions, ())))
    both = build_schedule("dualpipe", 2, 4, 2)
    with pytest.raises(ScheduleError, match="5 micro-batches can't be shared by 2 directions"):
        check(both._replace(num_micro_batches=5))


def test_peaks_are_counted_by_hand():
    """ZB-H1 of two ranks: rank 1 does F I F I W F I W ...: two held, of which one waits for W
    when the next I comes."""
    schedule = build_schedule("zb_h1", 2, 4, 1)
    assert " ".join(map(str, schedule.actions[1])) == (
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"
    )
    assert check(schedule) == ((2, 2), (0, 2))


# ---- timing ------------------------------------------------------------------------------------


def holds_from(name: str, ranks: int) -> int:
    """Micro-batches from which on the published formula is that of our list."""
    full = {"zb_h1": ranks, "zbv": 2 * ranks - 1, "dualpipev": 2 * ranks, "dualpipe": 2 * ranks}
    return full.get(name, 1)


@pytest.mark.parametrize(
    ("name", "ranks", "batches"),
    [
        (name, ranks, batches)
        for name in sorted(DEMANDS)
        for ranks in (2, 4, 8)
        for batches in (4, 8, 16, 32)
        if refusal(name, ranks, per_rank(name), batches) is None
    ],
)
def test_equal_costs_give_the_published_bubble(name, ranks, batches):
    """DualPipe's formula is for overlapped passes: without, our lists have half the bubble."""
    shape = (name, ranks, batches, per_rank(name))
    schedule = build_schedule(*shape)
    ours = bubble_fraction(schedule, equal_cost(schedule.num_stages))
    published = bubble_fraction_published(*shape)
    if name.startswith("dualpipe"):
        published /= 2
    if batches >= holds_from(name, ranks):
        assert ours == pytest.approx(published, abs=1e-12)
    else:
        assert ours > published
    ideal = 3 * batches * per_rank(name) / DEMANDS[name].num_directions
    assert makespan(schedule, equal_cost(schedule.num_stages)) == pytest.approx(
        ideal * (1 + ours), rel=1e-12
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb"])
def test_more_stages_per_rank_shrink_the_bubble(name, stages):
    schedule = build_schedule(name, 4, 8, stages)
    ours = bubble_fraction(schedule, equal_cost(schedule.num_stages))
    assert ours == pytest.approx(bubble_fraction_published(name, 4, 8, stages), abs=1e-12)
    assert ours == pytest.approx(bubble_fraction_published(name, 4, 8, 1) / stages, abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb"]),
    st.integers(1, 8),
    st.integers(1, 4),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
)
def test_unequal_costs_keep_the_looped_formulas(name, ranks, rounds, seconds):
    """For the zero-bubble ones as long as W is the shortest."""
    assume("zb" not in name or seconds[2] <= min(seconds[:2]))
    shape = (name, ranks, rounds * ranks, per_rank(name))
    schedule = build_schedule(*shape)
    ours = bubble_fraction(schedule, equal_cost(schedule.num_stages, *seconds))
    assert ours == pytest.approx(bubble_fraction_published(*shape, *seconds), abs=1e-12)


def test_few_micro_batches_leave_the_v_schedules_no_worse_than_zb_h1():
    for ranks in (2, 4, 8):
        for batches in range(1, 2 * ranks):
            v, h = (
                bubble_fraction(
                    build_schedule(name, ranks, batches, per_rank(name)),
                    equal_cost(ranks * per_rank(name)),
                )
                for name in ("zbv", "zb_h1")
            )
            assert v <= h + 1e-12


def test_a_zbv_rank_does_not_idle_between_its_first_and_its_last_action():
    """What the paper calls zero bubble."""
    for row in timeline(build_schedule("zbv", 4, 8, 2), equal_cost(8)):
        assert row[-1].end_s - row[0].start_s == 8 * 2 * 3


def test_the_time_between_ranks_is_paid_where_it_is_waited_for():
    """One micro-batch passes p-1 borders out and back; the turn of a V is inside a rank."""
    assert makespan(build_schedule("1f1b", 4, 1, 1), equal_cost(4, p2p_s=10)) == 12 + 60
    assert makespan(build_schedule("zbv", 2, 1, 2), equal_cost(4, 1, 1, 0, p2p_s=10)) == 8 + 40


def test_an_uneven_stage_is_priced_as_itself():
    schedule = build_schedule("gpipe", 2, 3, 1)
    cost = equal_cost(2)._replace(forward_s=(1.0, 5.0))
    assert makespan(schedule, cost) == 1 + 3 * 5 + 3 * 2 + 2
    assert bubble_fraction(schedule, cost) == pytest.approx(24 / 21 - 1)


# ---- splitting layers --------------------------------------------------------------------------


def all_splits(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))


def stage_costs(costs, split, first, last):
    remaining = iter(costs)
    stages = [sum(next(remaining) for _ in range(size)) for size in split]
    stages[0] += first
    stages[-1] += last
    return stages


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_the_split_is_the_best_of_all(costs, num_stages, first, last):
    """Lightest heaviest stage; then most even; then fewest layers early."""
    assume(num_stages <= len(costs))

    def worth(split):
        stages = stage_costs(costs, split, first, last)
        return max(stages), sum(cost**2 for cost in stages), split

    best = min(all_splits(len(costs), num_stages), key=worth)
    assert split_layers(costs, num_stages, first, last) == best


@given(st.lists(st.floats(0.01, 1e9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_split_of_odd_costs_is_as_light_as_the_best(costs, num_stages):
    assume(num_stages <= len(costs))
    split = split_layers(costs, num_stages, costs[0], costs[-1] / 3)
    heaviest = [
        max(stage_costs(costs, each, costs[0], costs[-1] / 3))
        for each in all_splits(len(costs), num_stages)
    ]
    assert max(stage_costs(costs, split, costs[0], costs[-1] / 3)) == pytest.approx(min(heaviest))


def test_equal_layers_split_evenly_and_a_heavy_head_has_fewer():
    assert split_layers([1] * 10, 4) == (2, 2, 3, 3)
    assert split_layers([1] * 16, 4, first_extra=0, last_extra=2.0) == (4, 4, 5, 3)
    assert split_layers([1.0] * 126, 64, 0.5, 2.0)[-1] == 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="3 layers can't be split into 4 stages: use 1 to 3"):
        split_layers([1, 1, 1], 4)


# ---- the page ----------------------------------------------------------------------------------


def test_the_pictures_of_the_page_are_those_of_the_lists():
    pictures = re.findall(r"```text (\w+) (\d+) (\d+)\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert {name for name, *_ in pictures} == set(DEMANDS)
    for name, ranks, batches, drawn in pictures:
        schedule = build_schedule(name, int(ranks), int(batches), per_rank(name))
        assert drawn == draw_schedule(schedule), f"{name} should be\n{draw_schedule(schedule)}"


def test_the_table_of_the_page_is_computed():
    computed = PAGE.read_text().split("## Measured")[0]
    rows = dict(re.findall(r"^\| (\w+) +\| (\d.*?) *\|$", computed, re.MULTILINE))
    assert set(rows) == set(DEMANDS)
    for name, cells in rows.items():
        assert [cell.strip() for cell in cells.split("|")] == table_row(name)


def table_row(name: str) -> list[str]:
    """p = 4, m = 8, times in F of a whole rank, memory in micro-batches of a whole rank."""
    schedule = build_schedule(name, 4, 8, per_rank(name))
    share = per_rank(name) // DEMANDS[name].num_directions
    cost, peaks = equal_cost(schedule.num_stages), check(schedule)
    span = makespan(schedule, cost) / share
    held, pending = (max(peak) / share for peak in peaks)
    return [
        f"{span:g}",
        f"{span - 24:g}",
        f"{100 * bubble_fraction(schedule, cost):.1f} %",
        f"{100 * bubble_fraction_published(name, 4, 8, per_rank(name)):.1f} %",
        f"{held:g}",
        f"{pending:g}",
    ]
