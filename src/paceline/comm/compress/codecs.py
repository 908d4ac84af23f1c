"""Which codec a name of a Job stands for."""

from paceline.comm.compress.blockwise import BLOCKWISE
from paceline.comm.compress.codec import BlockCodec
from paceline.comm.compress.topk import TopK
from paceline.config.comm import Codec


def codec_of(codec: Codec) -> BlockCodec:
    """The codec of a name; "none" and "powersgd" are none.

    Raises:
        ValueError: it is none.
    """
    if codec.kind == "topk":
        return TopK(codec.argument)
    if codec.kind not in BLOCKWISE:
        raise ValueError(f"{codec} codes no values one by one: use topk or {', '.join(BLOCKWISE)}.")
    return BLOCKWISE[codec.kind]
