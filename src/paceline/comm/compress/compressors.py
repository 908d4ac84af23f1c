"""Which compressor a Job's name of a compression stands for."""

import torch.distributed as dist

from paceline.comm.compress.codecs import codec_of
from paceline.comm.compress.low_rank import LowRankMeans
from paceline.comm.compress.means import CodecMeans, Compressor
from paceline.comm.compress.scaled import ScaledMeans
from paceline.config.comm import Codec


def compressor_of(codec: Codec, group: dist.ProcessGroup) -> Compressor | None:
    """The compressor of a codec among the ranks of a group; None: it is "none"."""
    if codec.kind == "none":
        return None
    if codec.kind == "powersgd":
        return LowRankMeans(int(codec.argument), group)
    if codec.kind == "quinary":
        return ScaledMeans(codec_of(codec), group)
    return CodecMeans(codec_of(codec), group)
