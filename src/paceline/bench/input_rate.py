"""Input rate: tokens per second that the data path delivers to one rank.

It reads as training does (`paceline.train.data`): samples in their shuffled order, gathered from
tokenised files, cut into micro-batches on the rank's device.
"""

from paceline.bench.clock import RankTimer
from paceline.config.job_sections import Data
from paceline.train.data import BatchShape, prepare, train_batches

# A small vocabulary needs no training, and tokens are as wide whatever made them.
DEFAULT = Data(tokenizer="bytes")
_SEQ_LEN = 512
_SAMPLES = 16


def measure_input_rate(clock: RankTimer, data: Data = DEFAULT) -> float:
    """Tokens per second of one rank, mean over ranks; every rank must call it.

    Args:
        clock: measures.
        data: what is read; it is tokenised first where it isn't yet.
    """
    ranks = clock.ranks
    shape = BatchShape(
        global_batch=_SAMPLES * ranks.world_size,
        micro_batch=_SAMPLES,
        seq_len=_SEQ_LEN,
        rank=ranks.rank,
        num_ranks=ranks.world_size,
        device=ranks.device,
    )
    steps = train_batches(prepare(data).dataset("train"), shape, 0, 0)
    return _SAMPLES * _SEQ_LEN / clock.seconds(lambda: next(steps))
