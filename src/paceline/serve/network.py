"""The network that is served: from a Run as it is, or from a folder of weights.

Nothing is converted: a Run's checkpoint is read into the module that was trained, whatever layout
it was trained on. A folder is what `paceline export` or transformers writes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from paceline.comm.forkserver_start import SERVING, warm_up_ranks
from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes, read_json
from paceline.config.heads import Heads
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.layers import StreamedLayers, decoder_in_layers
from paceline.generate.quantised import QuantisedWeights
from paceline.generate.text import special_name
from paceline.kernels.dtypes import DTYPES
from paceline.models.compressed import is_narrow, read_narrow
from paceline.models.decoder import Decoder
from paceline.models.heads import GuessHeads
from paceline.models.weights import by_layer, load_weights, read_model
from paceline.observe.run import Run
from paceline.serve.grammar import Grammars, Matcher
from paceline.train.data.tokenizer import end_name
from paceline.train.kept_tokenizer import GENERATION, about_tokens
from paceline.train.kept_weights import KeptWeights, weights_of

_OBJECT = TypeAdapter(dict[str, Any])
_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_CURE = "put a good copy there"


@dataclass(frozen=True)
class Network:
    """A decoder, and what is known of its tokens."""

    name: str
    """Of the run, or of the folder."""
    decoder: Decoder
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    """End a text."""
    chat_template: str | None
    """Makes a prompt of a conversation, in Jinja as transformers reads it; None: there is none."""
    settings: Mapping[str, Any]
    """What tokenizer_config.json says."""
    step: int | None
    """Of the checkpoint; None: the folder of another trainer."""
    layers: StreamedLayers | None = None
    """Of a decoder that was opened in them."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt: as a run trained on them, and with what the tokenizer of a folder
        puts around a text (most begin it with a token)."""
        return self.encoding(text).ids

    def encoding(self, text: str) -> Encoding:
        """The same, with their places in the text."""
        return self.tokenizer.encode(text, add_special_tokens=self.step is None)

    @property
    def first_token(self) -> int:
        """Before a text that has nothing before it: what begins texts, or else what ends them.

        Raises:
            InputError: the tokenizer has neither.
        """
        begin = special_name(self.settings.get("bos_token"))
        number = None if begin is None else self.tokenizer.token_to_id(begin)
        if number is None and not self.end_tokens:
            raise InputError(
                "A text has nothing before it, and the tokenizer no beginning or end of text: give "
                "it a context."
            )
        return min(self.end_tokens) if number is None else number

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """Of a text's grammar; None: it has none.

        Raises:
            InputError: the grammar can't be compiled, or llguidance is not installed.
        """
        if sampling.grammar is None:
            return None
        vocab = self.decoder.model.vocab_size
        return Grammars(self.tokenizer, vocab, self.end_tokens).matcher(sampling.grammar)

    def engine(self, serving: Serving) -> Engine:
        """An engine of this network; over several ranks, it takes the weights with it.

        Raises:
            InputError: as `Engine`; serve.draft is no network with the same tokenizer; or the
                network can't be shared out as the settings say.
        """
        if serving.num_ranks > 1:
            return self._shared_engine(serving)
        return Engine(
            self.decoder,
            serving,
            self.tokenizer,
            self.end_tokens,
            self._draft(serving),
            layers=self.layers,
        )

    def _shared_engine(self, serving: Serving) -> Engine:
        # Most servers have one rank, and start sooner without what several need.
        from paceline.generate.ranks import check_ranks
        from paceline.serve.ranks import Processes

        decoder = self.decoder
        check_ranks(decoder.model, serving)
        draft = self._draft(serving)
        others = Processes(decoder.model, next(decoder.parameters()).dtype, serving)
        others.take_weights(others.decoder, [decoder.state_dict()])
        decoder.to("meta")
        return Engine(others.decoder, serving, self.tokenizer, self.end_tokens, draft, others)

    def _draft(self, serving: Serving) -> Decoder | GuessHeads | None:
        path = serving.draft
        if path is None:
            return None
        run = Run(Path(path))
        if run.exists and isinstance(model := run.job().model, Heads):
            return self._heads(run, model)
        draft = open_network(Path(path), Serving(precision=serving.precision))
        if draft.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise InputError(
                f"serve.draft = {path} has another tokenizer than {self.name}: give a network that "
                "was trained with the same one."
            )
        return draft.decoder

    def _heads(self, run: Run, model: Heads) -> GuessHeads:
        heads = GuessHeads(model, self.decoder)
        _, weights = weights_of(run)
        heads.load_state_dict(weights)
        return heads.to(next(self.decoder.parameters()).device).eval()


def open_network(path: Path, serving: Serving | None = None, step: int | None = None) -> Network:
    """Read a network for this machine: on its first CUDA device where there is one.

    Args:
        path: the directory of a run, or a folder with config.json, safetensors and tokenizer.json.
        serving: the weights' precision and memory. Where ranks will share the network, it is read
            to host memory, and all is made ready to start them. None: as trained, on one device.
        step: of a run's checkpoint; None: the newest good one.

    Raises:
        InputError: neither, a network that isn't a decoder, no such checkpoint, damaged files, or
            as `layers_of`.
    """
    serving = serving or Serving()
    is_shared = serving.num_ranks > 1
    device = torch.device("cuda" if torch.cuda.is_available() and not is_shared else "cpu")
    if is_shared:
        warm_up_ranks(SERVING)
    if (path / "config.json").is_file():
        if step is not None:
            raise InputError(
                f"--step {step} is of a run's checkpoint, and {path} is a folder of weights: leave "
                "it out."
            )
        return _of_folder(path, serving, device)
    run = Run(path)
    if not run.exists:
        raise InputError(
            f"{path} is neither a run nor a folder of weights: give the directory of a run, such "
            "as runs/demo, or a folder with config.json and safetensors."
        )
    return _of_run(run, serving, step, device)


@torch.no_grad()
def load_checkpoint(
    run: Run,
    decoder: Decoder,
    step: int | None = None,
    after_layer: Callable[[], None] | None = None,
) -> int:
    """Put a checkpoint's weights into a decoder of the run, layer by layer, in its own types.

    Args:
        after_layer: is called when a layer is filled.

    Returns:
        the step they are of.

    Raises:
        InputError: no such checkpoint, or it is of another network; then nothing was changed.
    """
    kept, own = weights_for(decoder, run, step), decoder.state_dict()
    for part in in_layers(kept):
        for name, tensor in part.items():
            own[name].copy_(tensor)
        if after_layer is not None:
            after_layer()
    return kept.step


def in_layers(kept: KeptWeights) -> Iterator[dict[str, Tensor]]:
    """Read all weights, a layer at a time.

    Raises:
        InputError: as `KeptWeights.read`.
    """
    for names in by_layer({name: name for name in kept.shapes}):
        yield kept.read(names)


def weights_for(decoder: Decoder, run: Run, step: int | None = None) -> KeptWeights:
    """The weights of a checkpoint, all of which were verified and fit a decoder.

    Raises:
        InputError: as `load_checkpoint`.
    """
    kept, own = KeptWeights(run, step), decoder.state_dict()
    saved = kept.shapes
    odd = own.keys() ^ saved.keys() or {name for name in own if own[name].shape != saved[name]}
    if odd:
        raise InputError(
            f"checkpoint step-{kept.step} in {run.checkpoint_folder} is of another network "
            f"({min(odd)} differs): give the run that it belongs to."
        )
    return kept


def _of_run(run: Run, serving: Serving, step: int | None, device: torch.device) -> Network:
    job = run.job()
    if not isinstance(job.model, Model):
        raise InputError(
            f"{run.path} trained a {job.model.family}, and texts come from a decoder: give the run "
            "of one."
        )
    dtype = DTYPES[job.layout.param_dtype if serving.precision == "auto" else serving.precision]
    decoder, layers = decoder_in_layers(job.model, dtype, device, serving)
    decoder.reset_buffers()
    step = load_checkpoint(run, decoder, step, None if layers is None else layers.leave_files)
    files = about_tokens(run, job, job.model.max_seq_len)
    return _network(job.name, decoder, layers, files, step, run.path)


def _of_folder(folder: Path, serving: Serving, device: torch.device) -> Network:
    dtype = DTYPES[_written(folder) if serving.precision == "auto" else serving.precision]
    layers = None
    if is_narrow(folder):
        decoder, matrices = read_narrow(folder, dtype, device)
        QuantisedWeights(decoder, matrices.items()).install()
    else:
        decoder, layers = decoder_in_layers(read_model(folder), dtype, device, serving)
        load_weights(decoder, folder, None if layers is None else layers.leave_files)
    names = (_TOKENIZER, _SETTINGS, _TEMPLATE, GENERATION)
    files = {n: read_bytes(folder / n, _CURE) for n in names if (folder / n).is_file()}
    if _TOKENIZER not in files:
        raise InputError(f"{folder} has no {_TOKENIZER}: put it there, texts are made of tokens.")
    return _network(folder.resolve().name, decoder, layers, files, None, folder)


def _written(folder: Path) -> Literal["fp32", "bf16"]:
    """The type of a folder's weights, as config.json says; other types are taken as fp32."""
    said = read_json(folder / "config.json", _OBJECT, _CURE)
    return "bf16" if "bfloat16" in (said.get("dtype"), said.get("torch_dtype")) else "fp32"


def _network(
    name: str,
    decoder: Decoder,
    layers: StreamedLayers | None,
    files: Mapping[str, bytes],
    step: int | None,
    path: Path,
) -> Network:
    try:
        tokenizer = Tokenizer.from_buffer(files[_TOKENIZER])
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"{_TOKENIZER} of {path} can't be read: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings, generation = (_object(files.get(n), n, path) for n in (_SETTINGS, GENERATION))
    template = files.get(_TEMPLATE)
    known = settings.get("chat_template")
    return Network(
        name=name,
        decoder=decoder.eval(),
        tokenizer=tokenizer,
        end_tokens=_end_tokens(tokenizer, settings, generation),
        chat_template=template.decode() if template else known if isinstance(known, str) else None,
        settings=settings,
        step=step,
        layers=layers,
    )


def _end_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, Any], generation: Mapping[str, Any]
) -> frozenset[int]:
    """What is said of how to generate counts first, then what the tokenizer calls its end."""
    given = generation.get("eos_token_id")
    numbers = given if isinstance(given, list) else [given]
    name = special_name(settings.get("eos_token"))
    if not any(isinstance(number, int) for number in numbers):
        numbers = [tokenizer.token_to_id(each) for each in (name, end_name(tokenizer)) if each]
    return frozenset(number for number in numbers if isinstance(number, int))


def _object(contents: bytes | None, name: str, path: Path) -> dict[str, Any]:
    try:
        return {} if contents is None else parse_json(contents, _OBJECT)
    except ValueError as error:
        raise InputError(f"{name} of {path} {error}: remove it, or {_CURE}.") from None
