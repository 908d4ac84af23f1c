"""Published runs of convolutional networks: the network by its name, all devices as replicas."""

import re
from dataclasses import replace

import numpy as np

from paceline.config.hardware import Cluster, Device
from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.config.vision import ConvNet, EfficientNet, ResNet
from paceline.plan.convnet.kernels import VALUE_BYTES
from paceline.plan.convnet.memory import convnet_memory_bytes
from paceline.plan.convnet.step import predict_convnet
from paceline.plan.prediction import Prediction

# Families as papers and model zoos write them, in small letters.
_RESNET = re.compile(
    r"(?P<se>se[-_ ]?)?res(?P<next>next|net)[-_ ]?(?P<depth>\d+)"
    r"(?:[-_ ]?(?P<groups>\d+)x(?P<width>\d+)d)?(?:[-_ ]?v1\.5)?"
)
_EFFICIENTNET = re.compile(r"efficientnet[-_ ]?(?P<wide>wide[-_ ]?se[-_ ]?)?(?P<variant>b[0-7])")


def network_named(name: str, image_size: int) -> ConvNet | None:
    """The network of a published run by its usual name, None where it is not known."""
    plain = name.strip().lower()
    if found := _RESNET.fullmatch(plain):
        grouped = {
            "groups": int(found["groups"] or (32 if found["next"] == "next" else 1)),
            "width_per_group": int(found["width"] or (4 if found["next"] == "next" else 64)),
        }
        if int(found["depth"]) not in (18, 34, 50, 101, 152):
            return None
        return ResNet.parse(
            {
                "depth": int(found["depth"]),
                "image_size": image_size,
                "squeeze_excite": found["se"] is not None,
                **grouped,
            }
        )
    if found := _EFFICIENTNET.fullmatch(plain):
        wide = found["wide"] is not None
        return EfficientNet.parse(
            {"variant": found["variant"], "image_size": image_size, "wide_squeeze": wide}
        )
    return None


def predict_images_per_s(
    cluster: Cluster,
    name: str,
    image_size: int,
    precision: str,
    batch: int | None = None,
    stack: Stack | None = None,
) -> Prediction | str:
    """Predict a published run: all devices of the cluster as replicas, one micro-batch a step.

    Args:
        cluster: concrete.
        name: of the network, as published.
        image_size: pixels of a side.
        precision: as published: "fp32", "tf32", "fp16 AMP", "bf16" ...
        batch: images per device; None: the largest power of two up to 256 that fits, as published
            peak rates have it (named in the assumptions).
        stack: the software's features.

    Returns:
        the Prediction, with images per second as tokens_per_s; or why there is none, in a word.
    """
    network, device = network_named(name, image_size), cluster.device
    if network is None:
        return "network"
    word = precision.split()[0].lower().replace("mixed", "fp16").replace("amp", "fp16")
    if word not in VALUE_BYTES or device.peak(word) is None:
        return "precision"
    ranks = cluster.num_devices
    found = batch or _largest_batch(network, device, word)
    if found is None:
        return "memory"
    tf32 = word == "tf32"
    layout = Layout.parse(
        {"dp": ranks, "micro_batch": found, "precision": "fp32" if tf32 else word}
    )
    prediction = predict_convnet(network, cluster, layout, ranks * found, stack, tf32=tf32)
    if batch is None:
        told = {"batch": f"assumed: {found} images per device"}
        prediction = replace(prediction, assumptions={**prediction.assumptions, **told})
    return prediction


def _largest_batch(network: ConvNet, device: Device, precision: str) -> int | None:
    if device.memory_bytes is None:
        return None
    batches = 2 ** np.arange(9)
    total = sum(convnet_memory_bytes(network, batches, precision).values(), np.zeros(1))
    fitting = batches[total <= device.memory_bytes.value]
    return int(fitting[-1]) if len(fitting) else None
