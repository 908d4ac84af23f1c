"""What rounds of `fuzzed` draw: settings of an engine with its networks, and requests."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from paceline.config.sampling import Grammar, Sampling
from paceline.config.serving import KeyForm, Serving
from paceline.generate.engine import Engine
from paceline.generate.narrow_keys import kept_type
from paceline.generate.paged import KeyShape
from paceline.generate.quantised import QuantisedWeights, quantised_matrices
from paceline.models.decoder import Decoder
from tests.generate.networks import MODELS, built, heads_of, prompt, with_rounded_keys

END = 1
"""Ends a text."""
_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_GROUP = 64
_TRAINED_STEPS = 40


@dataclass(frozen=True)
class Setting:
    """An engine that was drawn."""

    name: str
    """Of the family."""
    dtype: torch.dtype
    serving: Serving
    guesser: str | None
    """Of `_GUESSERS`; None: the engine has no draft."""

    def engine(self) -> Engine:
        """A new one."""
        draft = None if self.guesser is None else _GUESSERS[self.guesser](self.name, self.dtype)
        # Layers that move stay in files for as long as their network lives.
        get = network if self.serving.weights_gb == "auto" else network.__wrapped__
        return Engine(get(self.name, self.dtype), self.serving, end_tokens=[END], draft=draft)

    def plain(self, tokens: list[int], keys: KeyForm) -> torch.Tensor:
        """Logits (num_tokens, vocab) by one pass of the network, without an engine."""
        decoder = network(self.name, self.dtype)
        with ExitStack() as forms, torch.inference_mode():
            forms.enter_context(_matrices_in(self.name, self.dtype, self.serving.weights)())
            if keys == "int8":
                forms.enter_context(with_rounded_keys(decoder))
            return decoder(torch.tensor([tokens]))[0].float()

    def alone(self) -> Engine:
        """An exact engine of the same sizes."""
        serving = self.serving
        return _alone(
            self.name, self.dtype, serving.weights, serving.block_size, serving.max_tokens
        )

    @property
    def kinds(self) -> list[str]:
        """What is counted of it."""
        serving = self.serving
        guesses = serving.speculate if self.guesser is None else f"{serving.speculate}, a draft"
        if serving.speculate != "auto" and self.guesser is not None:
            guesses = self.guesser
        return [
            self.name,
            str(self.dtype).removeprefix("torch."),
            f"{serving.weights} weights",
            f"{serving.kv} keys",
            f"exact: {serving.exact}",
            f"guesses: {guesses}",
            *["layers in files"] * (serving.weights_gb != "auto"),
            *["tiers"] * bool(serving.host_gb),
        ]


@lru_cache
def network(name, dtype) -> Decoder:
    return built(MODELS[name], dtype)


@lru_cache(8)
def _alone(name, dtype, weights, block_size, max_tokens):
    sizes = {"block_size": block_size, "max_tokens": max_tokens}
    exact = Serving(exact=True, weights=weights, share_prefixes=False, **sizes)
    return Engine(network(name, dtype), exact)


@lru_cache(4)
def _matrices_in(name, dtype, weights):
    """What puts a network's matrices into a form, while the plain network computes."""
    if weights == "as_trained":
        return nullcontext
    decoder = network(name, dtype)
    return QuantisedWeights(decoder, quantised_matrices(decoder, weights, _GROUP)).put_in


@lru_cache
def _cut(name, dtype):
    """The network without its last layer, and for shorter texts: sometimes right."""
    model = MODELS[name]
    draft = built(model.replace(num_layers=model.num_layers - 1, max_seq_len=60), dtype)
    weights = network(name, dtype).state_dict()
    draft.load_state_dict({n: weights[n][: len(own)] for n, own in draft.state_dict().items()})
    return draft


@lru_cache
def _trained(name):
    """Weights of heads that were trained on texts of the network."""
    decoder = network(name, torch.float32)
    engine = Engine(decoder, Serving(block_size=8))
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_end=True)
    texts = [engine.submit(prompt(12, seed), sampling) for seed in range(32)]
    while not engine.is_idle:
        engine.step()
    tokens = torch.tensor([text.tokens for text in texts])
    heads = heads_of(decoder)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
    for _ in range(_TRAINED_STEPS):
        heads(tokens[:, :-1], tokens[:, 1:], None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return heads.state_dict()


@lru_cache
def _heads(name, dtype):
    heads = heads_of(network(name, dtype))
    heads.load_state_dict(_trained(name))
    return heads


_GUESSERS = {"itself": network, "a layer less": _cut, "heads": _heads}
"""By what they are: the network, one that is sometimes right, trained heads."""


def draw_setting(draw, folder) -> Setting:
    """An engine; files are in the folder."""
    name, dtype = draw.choice([*MODELS]), draw.choice(_TYPES)
    # Heads guess by the output matrix alone.
    guessers = [one for one in _GUESSERS if one != "heads" or not MODELS[name].head_bias]
    kinds = ["off", "ngram", "draft", "draft", "heads", "auto"]
    speculate = draw.choice([kind for kind in kinds if kind != "heads" or kind in guessers])
    guesser = {
        "draft": draw.choice(["itself", "a layer less"]),
        "heads": "heads",
        "auto": draw.choice([None, *guessers]),
    }.get(speculate)
    size, decoder = draw.choice([2, 4, 8]), network(name, dtype)
    exact = draw.random() < 0.3
    kv = draw.choice(["as_weights", "as_weights", "auto" if exact else "int8", "auto"])
    # "auto" may come to keep whole rows, so it gets memory for these.
    kept = kept_type("int8" if kv == "int8" else "as_weights", dtype)
    block_gb = KeyShape.of(decoder).block_bytes(size, kept) / 1e9
    if guesser not in (None, "heads"):
        draft = _GUESSERS[guesser](name, dtype)
        block_gb += KeyShape.of(draft).block_bytes(size, dtype) / 1e9
    shares = draw.random() < 0.85
    host = draw.choice([0, 5, 30, 100, 300]) if shares else 0
    disk = draw.choice([0, 9, 200]) if host else 0
    weights = draw.choice(["as_trained", "as_trained", "int8", "int4"])
    if dtype == torch.float64:
        weights = "as_trained"
    weights_gb = "auto"
    if weights == "as_trained" and draw.random() < 0.25:
        weights_gb = _gb_of_layers(decoder, draw.randint(0, len(decoder.blocks)))
    serving = Serving(
        block_size=size,
        kv=kv,
        kv_gb=(draw.choice([40, 48, 64, 96, 96]) // size + 0.5) * block_gb,
        host_gb=host * block_gb,
        disk_gb=disk * block_gb,
        disk_folder=str(folder) if disk or weights_gb != "auto" else "",
        max_tokens=draw.choice([16, 32]) if exact else draw.choice([1, 3, 8, 40, 512]),
        max_sequences=draw.choice([1, 3, 6, 30]),
        share_prefixes=shares,
        exact=exact,
        weights=weights,
        weight_group=_GROUP,
        weights_gb=weights_gb,
        speculate=speculate,
        guess_tokens=draw.choice([1, 3, 6]),
    )
    return Setting(name, dtype, serving, guesser)


def _gb_of_layers(decoder, num_kept):
    """Memory for the rest of a network and so many of its layers."""
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in decoder.blocks]
    rest = sum(parameter.nbytes for parameter in decoder.parameters()) - sum(sizes)
    return (rest + num_kept * max(sizes) + 999) / 1e9  # and what aligning tensors takes


@dataclass
class Steps:
    """Alternating tokens, as a grammar: after an even token an odd one, so many in all."""

    num_left: int
    last: int = 0

    def leave_allowed(self, logits):
        logits[self.last % 2 :: 2] = -torch.inf

    def take(self, token):
        self.last, self.num_left = token, self.num_left - 1

    @property
    def is_over(self):
        return self.num_left <= 0


@dataclass
class Stops:
    """A text ends with two tokens of which the second is the first one's successor."""

    tokens: list[int] = field(default_factory=list)

    def __call__(self, tokens):
        self.tokens += tokens
        last = self.tokens[-2:]
        return "a stop" if len(last) == 2 and last[1] == last[0] + 1 else None


@dataclass
class Drawn:
    """A request."""

    prompt: list[int]
    sampling: Sampling
    salt: bytes
    num_steps: int | None
    """Of its grammar; None: it has none."""
    has_stops: bool
    num_told: int | None
    """Likeliest tokens that are told beside each of the prompt's; None: nothing is."""

    def submit(self, engine):
        return engine.submit(
            self.prompt,
            self.sampling,
            salt=self.salt,
            take_text=Stops() if self.has_stops else None,
            matcher=None if self.num_steps is None else Steps(self.num_steps),
            prompt_logprobs=self.num_told,
        )


def draw_request(draw, longest, number, exact, earlier) -> Drawn:
    """A request, which may go on with what an earlier sequence has."""
    tokens = prompt(draw.choice([0, 4, 9, 24, 33]), draw.randint(0, 2))
    if earlier and draw.random() < 0.5:  # as the next turn of a conversation
        tokens = [*draw.choice(earlier).tokens]
    tokens += prompt(draw.randint(1, 9), number)
    tokens = tokens[: longest - 1]
    num_told = draw.choice([0, 3, 20]) if draw.random() < 0.15 else None
    num_steps = draw.randint(1, 8) if draw.random() < 0.1 else None
    drawn = draw.random() < 0.5
    sampling = Sampling(
        max_tokens=draw.choice([1, 2, 5, 9, 14, 30] + [0, 0] * (num_told is not None)),
        temperature=draw.choice([0.7, 1.0, 2.0]) if drawn else 0.0,
        top_k=draw.choice([None, 1, 7]),
        top_p=draw.choice([1.0, 0.9, 0.3]),
        min_p=draw.choice([0.0, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
        presence_penalty=draw.choice([0.0, 0.0, -0.5]),
        logit_bias=draw.choice([{}, {}, {3: 4.0}]),
        ignore_end=draw.random() < 0.5,
        seed=draw.randrange(2**32),
        logprobs=20 if exact or draw.random() < 0.2 else None,
        grammar=None if num_steps is None else Grammar(kind="regex", source="by Steps"),
    )
    return Drawn(
        tokens,
        sampling,
        salt=draw.choice([b"", b"", b"a"]),
        num_steps=num_steps,
        has_stops=draw.random() < 0.2,
        num_told=num_told,
    )
