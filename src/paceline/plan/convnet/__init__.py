"""Time and memory of a convolutional network's step, trained with data parallelism and SGD.

How it works: a convolution is an implicit matrix product of pixels by channels, priced by the
device's curve for such a product times a bounded constant (`conv_time` of the Stack), and never
faster than its tensors cross the memory; batch norm, activations and residual sums are priced by
the passes they make over their tensors. The backward pass is two more products (none towards the
image), and norms' gradients. Gradients are reduced bucket by bucket beside it. What the planner
prices for one layer it prices for all in one call, as arrays over convolutions and points.

What is different from decoders: about half of the step is memory traffic, so the arrangement of
images counts (`Stack.channels_last`: tensor cores read channels together, and images that lie
otherwise are turned around before and after each convolution), and so does the fusing of norms.

What it is not: a model of the algorithms that cuDNN chooses (Winograd, FFT), nor of decoding and
augmenting images: where `input_images_per_s` is not given, the loader is taken never to be late,
and `assumptions` says so.

Legend of shapes: c convolutions, n points. Papers: implicit products (cuDNN)
https://arxiv.org/abs/1410.0759; buckets beside the backward pass https://arxiv.org/abs/2006.15704.
"""

from paceline.plan.convnet.memory import convnet_memory_bytes
from paceline.plan.convnet.step import (
    ConvnetTimes,
    ImageTraining,
    convnet_times,
    exchange_s,
    predict_convnet,
    training_of,
)

__all__ = [
    "ConvnetTimes",
    "ImageTraining",
    "convnet_memory_bytes",
    "convnet_times",
    "exchange_s",
    "predict_convnet",
    "training_of",
]
