"""Data of language models: sources -> documents -> tokens -> an order of samples -> batches.

`prepare_corpus` runs once, before the ranks start, which find it all there and iterate over
`train_batches` and the batches of `eval_steps`. Which samples a step reads is a pure function of
the seed and of how many samples the run has consumed, so that number is the whole state of the
data.
"""

from paceline.train.data.batches import BatchShape, MicroBatch, eval_batches, train_batches
from paceline.train.data.cache import PreparedData, open_prepared, prepare
from paceline.train.data.corpus import Corpus, prepare_corpus
from paceline.train.data.dataset import Meta, TokenDataset
from paceline.train.data.order import rank_share, sample_ids
from paceline.train.data.tokenizer import check_vocab

__all__ = [
    "BatchShape",
    "Corpus",
    "Meta",
    "MicroBatch",
    "PreparedData",
    "TokenDataset",
    "check_vocab",
    "eval_batches",
    "open_prepared",
    "prepare",
    "prepare_corpus",
    "rank_share",
    "sample_ids",
    "train_batches",
]
