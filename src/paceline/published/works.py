"""What published runs did, in the planner's words: language models and convolutional networks.

Both answer the same questions: what was run on what, how long would it take with these constants,
which constants does it depend on.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.config.hardware import Cluster, Device
from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.config.vision import ConvNet
from paceline.plan.calibrate import FITTED, predicted_step_s, with_constants
from paceline.plan.convnet import predict_convnet
from paceline.plan.points import Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.published.software import RunSoftware

Constants = Mapping[str, float]

_ON_CPUS = ("exchange_us", "hop_us", "again_us", "select_us", "unit_us")


@dataclass(frozen=True)
class _Work(ABC):
    """What all runs have."""

    layout: Layout
    software: RunSoftware
    inferred: tuple[str, ...]
    """Names of the cells that were not published."""

    @property
    @abstractmethod
    def cluster(self) -> Cluster:
        """The machine."""

    @property
    def device(self) -> Device:
        """What it ran on."""
        return self.cluster.device

    @property
    def num_devices(self) -> int:
        """How many of them."""
        return self.layout.num_ranks

    @property
    def stack_key(self) -> str:
        """Device and features: what a set of fitted constants belongs to."""
        stack = self.software.stack
        fused = "compiled" if self.layout.compile else stack.elementwise
        words = [self.device.name, self.software.family, fused, *self._feature_words(stack)]
        return " ".join(words)

    @abstractmethod
    def _feature_words(self, stack: Stack) -> list[str]:
        """Other features that matter."""


@dataclass(frozen=True)
class LanguageWork(_Work):
    """A language model."""

    setting: Setting

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.setting.cluster

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.setting.global_batch

    @property
    def units(self) -> int:
        """Tokens of a step."""
        return self.setting.global_batch * self.setting.seq_len

    @property
    def network_words(self) -> tuple[str, ...]:
        """Shapes, but for the vocabulary, which is padded to suit the layout."""
        model = self.setting.model
        words = f"{model.num_layers} layers, {model.hidden_size} wide, {model.num_heads} heads"
        experts = f"{model.experts.num_experts} experts" if model.experts else ""
        return (words, experts, f"seq {self.setting.seq_len}")

    @property
    def fitted(self) -> tuple[str, ...]:
        """All but those of convolutions and of copies to the host; CPUs have some of their own."""
        others = () if self.device.kind == "cpu" else _ON_CPUS
        return tuple(name for name in FITTED if name not in others)

    def seconds(self, constants: Constants) -> float:
        """Seconds of a step with these constants."""
        return predicted_step_s(self._setting(constants), self.layout)

    def predict(self, constants: Constants) -> Prediction:
        """Time and memory with these constants."""
        return predict(self._setting(constants), self.layout)

    def _setting(self, constants: Constants) -> Setting:
        return replace(self.setting, stack=with_constants(self.setting.stack, constants))

    def _feature_words(self, stack: Stack) -> list[str]:
        arithmetic = {"fp8": ["8-bit"], "fp4": ["4-bit"]}.get(self.software.precision, [])
        graphs = ["graphs"] if stack.launch == "graph" else []
        experts = ["experts"] if self.setting.model.experts else []
        adapters = ["adapters"] if self.setting.finetune.is_adapted else []
        return [stack.attention, *graphs, *arithmetic, *experts, *adapters]


@dataclass(frozen=True)
class ImageWork(_Work):
    """A convolutional network, trained on replicas."""

    network: ConvNet
    machine: Cluster

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.machine

    @property
    def global_batch(self) -> int:
        """Images of a step."""
        return self.layout.micro_batch * self.layout.num_ranks

    @property
    def units(self) -> int:
        """Images of a step."""
        return self.global_batch

    @property
    def network_words(self) -> tuple[str, ...]:
        """Its settings."""
        return (str(self.network),)

    @property
    def fitted(self) -> tuple[str, ...]:
        """Those of convolutions instead of those of transformers."""
        others = ("matmul_time", "attention_time", *_ON_CPUS)
        return ("conv_time", *(name for name in FITTED if name not in others))

    def seconds(self, constants: Constants) -> float:
        """Seconds of a step with these constants."""
        return self.predict(constants).step_s

    def predict(self, constants: Constants) -> Prediction:
        """Time and memory with these constants."""
        stack = with_constants(self.software.stack, constants)
        tf32 = self.software.precision == "tf32"
        return predict_convnet(
            self.network, self.machine, self.layout, self.global_batch, stack, tf32=tf32
        )

    def _feature_words(self, stack: Stack) -> list[str]:
        return ["images", self.software.precision]


PublishedWork = LanguageWork | ImageWork
"""What a run did."""
