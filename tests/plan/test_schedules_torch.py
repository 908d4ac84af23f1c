"""Our pipeline lists against those that torch.distributed.pipelining makes. One process, no group:
torch's generators are called on stand-ins that have the few numbers they read.

The only difference is that ours do not split the backward pass of stage 0.
"""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from paceline.config.schedule import refusal
from paceline.plan.schedules import build_schedule


def flat(actions) -> list[str]:
    """torch's list as text, without its pauses and with overlapped pairs one after the other."""
    pairs = [action.sub_actions or (action,) for action in actions if action is not None]
    texts = [str(action) for pair in pairs for action in pair]
    texts = [text for text in texts if "REDUCE" not in text]
    return [
        text.replace("0I", "0B", 1) if text[:2] == "0I" else text
        for text in texts
        if text[:2] != "0W"
    ]


def looped(cls, ranks: int, batches: int, stages: int):
    rounds = max(1, batches // ranks)
    stand_in = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=stages,
        number_of_rounds=rounds,
        microbatches_per_round=batches // rounds,
        _n_microbatches=batches,
    )
    return [cls._calculate_single_rank_operations(stand_in, rank) for rank in range(ranks)]


def v_shaped(cls, ranks: int, batches: int, stages: int):
    stand_in = SimpleNamespace(
        pp_group_size=ranks, num_stages=2 * ranks, n_local_stages=2, _n_microbatches=batches
    )
    return [cls._calculate_single_rank_operations(stand_in, rank) for rank in range(ranks)]


def single(cls, ranks: int, batches: int, stages: int):
    stand_in = SimpleNamespace(_num_stages=ranks, pp_group_size=ranks, _n_microbatches=batches)
    order = cls._get_pipeline_order(stand_in)
    return [order[rank] for rank in range(ranks)]


# Name, how to call the generator, the generator, stages per rank, least micro-batches per rank.
CASES = [
    ("gpipe", single, "ScheduleGPipe", 1, 0),
    ("1f1b", single, "Schedule1F1B", 1, 1),
    ("interleaved", looped, "ScheduleInterleaved1F1B", 2, 1),
    ("interleaved", looped, "ScheduleInterleaved1F1B", 3, 1),
    ("zb_h1", looped, "ScheduleInterleavedZeroBubble", 1, 0),
    ("interleaved_zb", looped, "ScheduleInterleavedZeroBubble", 2, 1),
    ("interleaved_zb", looped, "ScheduleInterleavedZeroBubble", 4, 1),
    ("zbv", v_shaped, "ScheduleZBVZeroBubble", 2, 0),
    ("dualpipev", v_shaped, "ScheduleDualPipeV", 2, 2),
]


@pytest.mark.parametrize(("name", "generate", "cls", "stages", "least"), CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_same_order_as_torch(name, generate, cls, stages, least, ranks):
    # The list that torch shows for 1F1B starts its last rank at the second micro-batch (2.13).
    compared = slice(-1) if name == "1f1b" else slice(None)
    for batches in range(max(1, least * ranks), 4 * ranks + 2):
        if refusal(name, ranks, stages, batches) is None:
            ours = build_schedule(name, ranks, batches, stages).actions
            expected = generate(getattr(theirs, cls), ranks, batches, stages)
            as_text = [list(map(str, row)) for row in ours[compared]]
            assert as_text == [flat(row) for row in expected[compared]]
