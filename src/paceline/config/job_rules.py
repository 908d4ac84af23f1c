"""What the sections of a Job demand of each other: a sentence for each demand that isn't met.

What a layout demands of model and cluster is `feasible`'s, and is asked when all of it is known.
"""

from paceline.config.elastic import Elastic
from paceline.config.finetune import Finetune, Grpo
from paceline.config.job_sections import (
    LOCAL_HOST,
    Checkpoint,
    Data,
    Observe,
    Sections,
    Train,
)
from paceline.config.mixture_rules import mixture_problem
from paceline.config.model import Model
from paceline.config.optim import Optim
from paceline.config.recommender import RowOptim
from paceline.config.stream import problems
from paceline.config.vision import SYNTHETIC, Images

LENGTHS = ("steps", "epochs", "tokens")
"""Settings of [train] that say how long a run is; one of them is given."""


def disagreement(job: Sections) -> str | None:
    """What two sections demand that can't both hold, None where they agree."""
    model, train, optim = job.model, job.train, job.optim
    lengths = {name: getattr(train, name) for name in LENGTHS}
    given = [f"train.{name} = {value}" for name, value in lengths.items() if value]
    if not given:
        is_given = "steps" in train.model_fields_set
        what = "= 0 is no run, it must be greater than 0" if is_given else "is missing"
        return f"train.steps {what}: give it a value, or give train.epochs or train.tokens."
    if len(given) > 1:
        return f"{' and '.join(given)} each say how long the run is: keep one of them."
    if train.tokens is not None and model.unit != "tokens":
        return (
            f"{given[0]} counts what language models read and this model reads samples: give "
            "train.steps instead."
        )
    longest = model.longest_sequence
    if longest is not None and train.seq_len > longest:
        return (
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = "
            f"{longest}: shorten the one or raise the other."
        )
    ramps = optim.warmup_steps + (optim.decay_steps if optim.schedule == "wsd" else 0)
    if ramps > train.steps > 0:
        return (
            f"warm-up and decay take {ramps} steps but train.steps = {train.steps}: "
            "shorten optim.warmup_steps or optim.decay_steps."
        )
    window = job.observe.profile_steps + 1
    if 0 < job.observe.profile_every < window:
        return (
            f"observe.profile_every = {job.observe.profile_every} is shorter than a window of "
            f"{job.observe.profile_steps} profiled steps and one of warm-up: give {window} or more."
        )
    if optim.decay_steps and optim.schedule != "wsd":
        return (
            f"optim.decay_steps = {optim.decay_steps} has no effect with "
            f'optim.schedule = "{optim.schedule}": set it to 0 or use schedule = "wsd".'
        )
    if optim.schedule == "wsd" and not optim.decay_steps:
        return (
            'optim.schedule = "wsd" falls over the last optim.decay_steps, and these are 0: give '
            'their number, or use schedule = "constant".'
        )
    if job.checkpoint.best is None and job.checkpoint.best_is != Checkpoint().best_is:
        return (
            f'checkpoint.best_is = "{job.checkpoint.best_is}" has no effect without a figure to '
            'judge by: set checkpoint.best = "eval_loss" as well.'
        )
    if train.patience and job.checkpoint.best is None:
        return (
            f"train.patience = {train.patience} has no effect without a figure to judge by: set "
            'checkpoint.best = "eval_loss" as well.'
        )
    if job.checkpoint.copy_to is not None and model.has_tables:
        return (
            f"checkpoint.copy_to = {job.checkpoint.copy_to!r} would leave out the tables of a "
            "recommender, which has checkpoints of its own: leave it out."
        )
    observe = job.observe
    if observe.prometheus_port is None and observe.prometheus_host != LOCAL_HOST:
        return (
            f"observe.prometheus_host = {observe.prometheus_host!r} has no effect without "
            "observe.prometheus_port: give the port or leave it out."
        )
    if not observe.profile_every and observe.profile_steps != Observe().profile_steps:
        return (
            f"observe.profile_steps = {observe.profile_steps} has no effect with "
            "observe.profile_every = 0: set that or leave it out."
        )
    if observe.noise_scale_every and (problem := _noise_scale(job)):
        return problem
    if observe.samples and not model.knows_layers:
        return (
            f'observe.samples are texts of a decoder, and model.family = "{model.family}" is none: '
            "leave them out."
        )
    if not observe.samples and observe.sample_tokens != Observe().sample_tokens:
        return (
            f"observe.sample_tokens = {observe.sample_tokens} has no effect without "
            "observe.samples: give prompts, or leave it out."
        )
    if "" in observe.samples:
        return "observe.samples has an empty prompt: give each at least a character."
    if optim.schedule == "constant" and optim.final_lr_ratio != Optim().final_lr_ratio:
        return (
            f"optim.final_lr_ratio = {optim.final_lr_ratio} has no effect with "
            'optim.schedule = "constant": leave it out or use another schedule.'
        )
    return (
        _optimizer(job)
        or _images(job)
        or _of_language_models(job)
        or mixture_problem(job.data)
        or _conversations(job)
        or _objective(job)
        or _adapters(job)
        or _masks(job)
        or _streams(job)
        or _elastic(job)
        or _exact(job)
        or _hot_experts(job)
        or _recommenders(job)
    )


_OF_ADAPTERS = ("rank", "alpha", "dropout", "targets", "decomposed", "factors", "base", "adapters")
_LEARNS_FROM = {"dpo": "preferences", "grpo": "prompts"}
"""Rows that an objective other than likelihood needs."""
NO_TEACHER = ("tp", "pp", "cp")
"""Axes of a layout that would have to cut a teacher, too."""
_SIZE_FREE = ("adamw", "lion", "schedulefree")
"""Optimizers whose steps don't depend on the size of gradients or parameters."""


def _masks(job: Sections) -> str | None:
    """What needs a network that sees later tokens, or one that doesn't."""
    if not job.model.sees_later_tokens:
        for name in ("mask_share", "mask_token"):
            if (value := getattr(job.data, name)) is not None:
                return (
                    f"data.{name} = {value} has no effect on a model that learns the next token: "
                    "leave it out, or set model.causal = false."
                )
        return None
    odd = {
        "observe.samples": bool(job.observe.samples),
        "train.exact_eval": job.train.exact_eval,
        f'data.records = "{job.data.records}"': job.data.has_answers,
    }
    for name, is_set in odd.items():
        if is_set:
            return (
                f"{name} needs a model that learns the next token, and model.causal = false learns "
                "masked ones: leave it out."
            )
    return None


def _optimizer(job: Sections) -> str | None:
    """What is set that an optimizer doesn't take, or can't do."""
    optim, layout = job.optim, job.layout
    setting = f'optim.name = "{optim.name}"'
    if optim.problem is not None or optim.name == "adamw":
        return optim.problem
    if getattr(job.model, "parametrization", None) and optim.name not in _SIZE_FREE:
        return (
            f'model.parametrization = "mup" is for {", ".join(_SIZE_FREE)}, but {setting}: use one '
            "of these, or leave parametrization out."
        )
    if layout.optimizer_state == "8bit":
        return (
            f'layout.optimizer_state = "8bit" is of AdamW, but {setting}: use "full", or '
            'optim.name = "adamw".'
        )
    if "optimizer" in layout.offload:
        return (
            f'layout.offload = "optimizer" is of AdamW, but {setting}: leave it out, or use '
            'optim.name = "adamw".'
        )
    if job.elastic.exact:
        return (
            f"elastic.exact = true needs an update with the same bits on any number of ranks, but "
            f'{setting}: use optim.name = "adamw", or set exact to false.'
        )
    if optim.name == "schedulefree" and job.comm.local.method != "none":
        return (
            f"{setting} evaluates a mean that each worker has of its own with comm.local.method = "
            f'"{job.comm.local.method}": use another optimizer, or method = "none".'
        )
    return None


def _of_language_models(job: Sections) -> str | None:
    """What is set of text that a network without text never sees."""
    if job.model.takes_text:
        return None
    data, train = Data(source=job.data.source, clicks=job.data.clicks), job.train
    if job.model.takes_images and data.source != SYNTHETIC:
        data = data.replace(images=job.data.images, eval_fraction=job.data.eval_fraction)
    given = {f"data.{name}": (value, getattr(data, name)) for name, value in job.data}
    given["train.seq_len"] = (train.seq_len, Train.model_fields["seq_len"].default)
    given["train.weights"] = (train.weights, None)
    given["train.exact_eval"] = (train.exact_eval, False)
    for name, (value, none) in given.items():
        if value != none:
            return (
                f"{name} = {value!r} is of language models and has no effect with model.family = "
                f'"{job.model.family}": leave it out.'
            )
    return None


def _images(job: Sections) -> str | None:
    """What is set of images where none are read from files."""
    data = job.data
    is_read = job.model.takes_images and data.source != SYNTHETIC
    for name, value in data.images:
        if not is_read and value != getattr(Images(), name):
            return (
                f"data.images.{name} = {value!r} is of images in files, for a ResNet: leave it "
                "out, or let data.source name some."
            )
    if data.images.eval_source is not None and data.eval_fraction != Data().eval_fraction:
        return (
            f"data.eval_fraction = {data.eval_fraction} has no effect with "
            "data.images.eval_source, which names what is held out: leave one of them out."
        )
    return None


def _packing(job: Sections) -> str | None:
    """What can't be had with documents that are packed whole."""
    data, experts = job.data, job.model.mixture
    odd = {
        f'data.records = "{data.records}" (packed in its own way)': data.has_answers,
        "data.stream (read as it comes)": data.stream.is_on,
        "data.reset_at_documents = true (which it does anyway)": data.reset_at_documents,
        "model.causal = false (which guesses tokens anywhere)": job.model.sees_later_tokens,
        "train.exact_eval = true (which counts every token)": job.train.exact_eval,
        "model.experts.balance_loss (to which all samples count alike)": experts is not None
        and experts.balance_loss > 0,
        f'model.family = "{job.model.family}" (no decoder)': not job.model.knows_layers,
    }
    for name, is_set in odd.items():
        if is_set:
            return (
                f'data.packing = "{data.packing}" can\'t be had with {name}: leave one of both out.'
            )
    return None


def _conversations(job: Sections) -> str | None:
    """What can't be had with conversations, or without them."""
    data, experts = job.data, job.model.mixture
    if data.packing != "concatenate" and (problem := _packing(job)) is not None:
        return problem
    if data.records == "text":
        if data.chat_template is not None:
            return (
                f"data.chat_template = {data.chat_template!r} has no effect with data.records = "
                '"text": set that to "chat", or leave it out.'
            )
        return None
    records = f'data.records = "{data.records}"'
    if not job.model.knows_layers:
        return (
            f"{records} trains a decoder on answers, and model.family = "
            f'"{job.model.family}" is none: leave it out.'
        )
    if data.sources or data.eval_sets:
        return (
            f"{records} is of one data.source, and there are data.sources or "
            "data.eval_sets: leave these out."
        )
    if (chosen := data.chosen_by) is not None:
        return f"{chosen} chooses among texts, and {records}: leave one of them out."
    if data.text_field != Data().text_field:
        return (
            f"data.text_field = {data.text_field!r} has no effect with {records}, whose columns "
            "have names of their own: leave it out."
        )
    if job.train.exact_eval:
        return (
            f"train.exact_eval = true counts every token, and {records} answers alone: leave one "
            "of them out."
        )
    if experts is not None and experts.balance_loss:
        return (
            f"model.experts.balance_loss = {experts.balance_loss} is a part of a mean in which all "
            f"samples count alike, and with {records} they count by their answers: set "
            "it to 0 (bias_update_speed balances experts as well)."
        )
    return None


def _objective(job: Sections) -> str | None:
    """What an objective demands of the rest, and what only it has."""
    finetune, records = job.finetune, job.data.records
    setting = f'finetune.objective = "{finetune.objective}"'
    needed = _LEARNS_FROM.get(finetune.objective)
    if needed is not None and records != needed:
        return (
            f'{setting} learns from data.records = "{needed}", and this Job\'s are "{records}": '
            "change one of them."
        )
    for name, learnt in _LEARNS_FROM.items():
        if needed is None and records == learnt:
            return (
                f'data.records = "{records}" has no answers that {setting} could learn from: use '
                f'finetune.objective = "{name}".'
            )
    for name in (*_LEARNS_FROM, "distill"):
        if name != finetune.objective and getattr(finetune, name) != getattr(Finetune(), name):
            return (
                f"finetune.{name} has no effect with {setting}: leave it out, or use objective = "
                f'"{name}".'
            )
    if job.data.columns and records != "prompts":
        return (
            f"data.columns are told to a reward function, which {setting} doesn't have: leave them "
            "out."
        )
    if finetune.objective == "grpo":
        return _rewards(job)
    if finetune.objective == "distill":
        return _teacher(job)
    return None


def _teacher(job: Sections) -> str | None:
    """What learning from another network needs."""
    setting, distill = 'finetune.objective = "distill"', job.finetune.distill
    teacher, student = distill.model, job.model
    if teacher is None:
        return (
            f"{setting} needs finetune.distill.teacher: name a run or a folder of weights that is "
            "to be learnt from."
        )
    if not isinstance(student, Model) or not (student.causal and teacher.causal):
        return (
            f"{setting} is of decoders that predict the next token, and the Job's network or its "
            "teacher does something else: use another objective."
        )
    if student.vocab_size != teacher.vocab_size:
        return (
            f"model.vocab_size = {student.vocab_size} gives other logits than the teacher "
            f"{distill.teacher} has, {teacher.vocab_size}: make them as many, with its tokens."
        )
    if job.train.seq_len > teacher.max_seq_len:
        return (
            f"train.seq_len = {job.train.seq_len} is longer than what the teacher "
            f"{distill.teacher} reads, {teacher.max_seq_len} tokens: shorten it."
        )
    for axis in NO_TEACHER:
        if (ways := getattr(job.layout, axis)) not in (1, "auto"):
            return (
                f"{setting} keeps a teacher whole or sharded, and layout.{axis} = {ways} would cut "
                f"it: set {axis} = 1, and use dp, fsdp and ep."
            )
    return None


def _rewards(job: Sections) -> str | None:
    """What completions and their rewards need."""
    grpo, size = job.finetune.grpo, job.train.global_batch
    if grpo.reward is None:
        return (
            'finetune.objective = "grpo" needs finetune.grpo.reward, "file.py:function": name your '
            "function."
        )
    if size % grpo.group:
        return (
            f"train.global_batch = {size} is no multiple of finetune.grpo.group = {grpo.group}: "
            "make it one."
        )
    if grpo.updates == 1 and grpo.clip != Grpo().clip:
        return (
            f"finetune.grpo.clip = {grpo.clip} has no effect with one step on the same "
            "completions: raise finetune.grpo.updates, or leave it out."
        )
    return None


def _adapters(job: Sections) -> str | None:
    """What is set of adapters that nothing has, or that can't have it."""
    finetune = job.finetune
    if not finetune.is_adapted:
        for name, value in finetune:
            if name in _OF_ADAPTERS and value != getattr(Finetune(), name):
                return (
                    f"finetune.{name} = {value!r} has no effect with finetune.method = "
                    f'"{finetune.method}": leave it out, or use method = "lora".'
                )
        return None
    if not job.model.knows_layers:
        return (
            f'finetune.method = "lora" adapts a decoder, and model.family = "{job.model.family}" '
            "is none: leave it out (a module of your own takes adapters by itself)."
        )
    if finetune.factors == "a" and finetune.adapters is None:
        return (
            'finetune.factors = "a" trains beside matrices B that begin as zero, and learns '
            'nothing: name adapters to start from (finetune.adapters), or use factors = "b".'
        )
    unused = {
        "layout.precision": (job.layout.precision, "fp8"),
        "train.exact_eval": (job.train.exact_eval, True),
        "observe.samples": (bool(job.observe.samples), True),
    }
    for name, (value, refused) in unused.items():
        if value == refused:
            shown = "true" if refused is True else f'"{refused}"'
            return (
                f"{name} = {shown} doesn't work beside adapters yet: leave it out, or use "
                'finetune.method = "full".'
            )
    return None


def _streams(job: Sections) -> str | None:
    """What a live source demands of the rest."""
    stream, data = job.data.stream, job.data
    if (problem := next(problems(stream), None)) is not None or not stream.is_on:
        return problem
    if not job.model.knows_layers:
        return (
            f'data.stream is of decoders, and model.family = "{job.model.family}" is none: leave '
            "it out."
        )
    if data.records != "text":
        return (
            f'data.records = "{data.records}" can\'t be had of a stream, whose texts count whole: '
            "leave one of them out."
        )
    if data.sources or data.eval_sets:
        return (
            f"data.{'sources' if data.sources else 'eval_sets'} can't be mixed with data.stream, "
            "whose held-out text data.source names: leave one of them out."
        )
    if (chosen := data.chosen_by) is not None:
        return f"{chosen} has no effect on a stream, which is read whole: leave it out."
    if job.train.epochs is not None:
        return (
            f"train.epochs = {job.train.epochs} counts passes over the data, and a stream has no "
            "end: give train.steps or train.tokens instead."
        )
    if job.comm.local.method != "none":
        return (
            f'comm.local.method = "{job.comm.local.method}" has workers that step each for itself, '
            "and a stream is waited for by all of them together: set the method to "
            '"none", or leave data.stream out.'
        )
    if stream.keep_gb is not None and job.checkpoint.copy_to is not None:
        return (
            f"data.stream.keep_gb = {stream.keep_gb} removes what the checkpoints on this disk "
            f"have passed, and those in {job.checkpoint.copy_to!r} may need it: leave one of both "
            "out."
        )
    if data.source != Data().source:
        return None
    if job.train.eval_every:
        return (
            f"train.eval_every = {job.train.eval_every} needs texts that are held out, and a "
            "stream has none: give data.source, texts that are there already, or leave it out."
        )
    if data.tokenizer.startswith("bpe:"):
        return (
            f'data.tokenizer = "{data.tokenizer}" is trained before the stream starts: give '
            'data.source, texts that are there already, or "bytes", or a tokenizer.json.'
        )
    return None


_OF_ELASTIC_RUNS = (
    "max_nodes", "spares", "exact", "heartbeat_s", "wait_s", "first_limit_s", "copy_every",
    "restarts", "replace_slow",
)  # fmt: skip


def _noise_scale(job: Sections) -> str | None:
    """Why parts of a batch can't be compared with the whole of it."""
    every, layout = job.observe.noise_scale_every, job.layout
    start = f"observe.noise_scale_every = {every} compares the gradients of parts of a batch"
    cut = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) not in (1, "auto")]
    if cut:
        return (
            f"{start}, each whole on a rank, and layout.{cut[0]} = {getattr(layout, cut[0])} cuts "
            "them: use dp or fsdp, or set it to 0."
        )
    unlike = {
        "comm.local": job.comm.local.method != "none",
        "elastic.exact": job.elastic.exact,
        "tables of a recommender": job.model.has_tables,
    }
    if what := next((name for name, is_so in unlike.items() if is_so), None):
        return f"{start} with that of all of it, which no step has with {what}: set it to 0."
    if job.train.global_batch == layout.micro_batch:
        return (
            f"{start}, and layout.micro_batch = {layout.micro_batch} makes one part of "
            f"train.global_batch = {job.train.global_batch}: lower micro_batch, or set it to 0."
        )
    return None


def _elastic(job: Sections) -> str | None:
    """What a run demands that goes on without a lost machine, and what would have no effect."""
    elastic, default = job.elastic, Elastic()
    if elastic.on_spike != "go_on" and job.comm.local.method != "none":
        return (
            f'elastic.on_spike = "{elastic.on_spike}" needs ranks that agree on the loss of each '
            f'step, and with comm.local.method = "{job.comm.local.method}" they meet only in '
            'rounds: set it to "go_on".'
        )
    if not elastic.is_on:
        for name in _OF_ELASTIC_RUNS:
            if getattr(elastic, name) != getattr(default, name):
                return (
                    f"elastic.{name} = {getattr(elastic, name)} has no effect with "
                    "elastic.min_nodes = 0: set that to 1 or more, or leave it out."
                )
        return None
    if elastic.max_nodes and elastic.max_nodes < elastic.min_nodes:
        return (
            f"elastic.max_nodes = {elastic.max_nodes} is less than elastic.min_nodes = "
            f"{elastic.min_nodes}: raise the one or lower the other."
        )
    if job.model.has_tables:
        return (
            f"elastic.min_nodes = {elastic.min_nodes} needs a model without tables on parameter "
            "servers, which can't be lost: set it to 0."
        )
    if job.comm.local.method != "none":
        return _elastic_workers(job)
    return None


def _elastic_workers(job: Sections) -> str | None:
    """What an elastic run demands of workers that step each for itself."""
    elastic, method = job.elastic, job.comm.local.method
    if method == "streaming":
        return (
            f"elastic.min_nodes = {elastic.min_nodes} needs rounds of everything, and "
            'comm.local.method = "streaming" is always between two of some fragment: use "diloco", '
            "or set min_nodes to 0."
        )
    if elastic.exact:
        return (
            "elastic.exact = true is of sums over all ranks in each step, and with "
            f'comm.local.method = "{method}" there are none: set it to false.'
        )
    if elastic.copy_every != Elastic().copy_every:
        return (
            f"elastic.copy_every = {elastic.copy_every} has no effect with comm.local.method = "
            f'"{method}", whose workers keep a copy of each round: leave it out.'
        )
    return None


def _exact(job: Sections) -> str | None:
    """What can't have the same bits on any number of ranks."""
    if not job.elastic.exact:
        return None
    model, comm = job.model, job.comm
    if model.has_batch_norms and not model.is_own:  # one's own is looked at when it is there
        return (
            "elastic.exact = true needs a model without batch norms, whose running statistics are "
            f'each rank\'s own, and model.family = "{model.family}" has them: set it to false.'
        )
    forms = {
        "dp.compress": comm.dp.compress,
        "fsdp.compress": comm.fsdp.compress,
        "fsdp.compress_weights": comm.fsdp.compress_weights,
        "pp.compress": comm.pp.compress,
        "ep.compress": comm.ep.compress,
    }
    for name, form in forms.items():
        if form != "none":
            return (
                f'comm.{name} = "{form}" rounds what elastic.exact = true keeps exact: set it to '
                '"none", or exact to false.'
            )
    if comm.ep.hot_experts:
        return (
            f"comm.ep.hot_experts = {comm.ep.hot_experts} sums gradients of an expert rank by "
            "rank, which rounds as elastic.exact = true must not: set it to 0, or exact to false."
        )
    if comm.dp.algorithm not in ("auto", "backend"):
        return (
            f'comm.dp.algorithm = "{comm.dp.algorithm}" has no effect with elastic.exact = true, '
            "which has an exchange of its own: leave it out."
        )
    return None


def _hot_experts(job: Sections) -> str | None:
    """Copies of experts that can't be, or a time between choices of none."""
    ours, mixture = job.comm.ep, job.model.mixture
    if not ours.hot_experts:
        if ours.hot_every == type(ours)().hot_every:
            return None
        return (
            f"comm.ep.hot_every = {ours.hot_every} has no effect with comm.ep.hot_experts = 0: "
            "raise hot_experts or leave it out."
        )
    if mixture is None:
        return (
            f"comm.ep.hot_experts = {ours.hot_experts} needs a model with experts, and this one is "
            "dense: leave it out."
        )
    if ours.hot_experts >= mixture.num_experts:
        return (
            f"comm.ep.hot_experts = {ours.hot_experts} must be less than model.experts.num_experts "
            f"= {mixture.num_experts}: lower it."
        )
    return None


def _recommenders(job: Sections) -> str | None:
    """What a Job says about recommenders that can't hold."""
    embeddings = job.comm.embeddings
    if not job.model.has_tables:
        if embeddings != type(embeddings)():
            return (
                f'[comm.embeddings] has no effect with model.family = "{job.model.family}": '
                'leave it out, or use family = "dlrm".'
            )
        for name, section in (("data.clicks", job.data.clicks), ("optim.rows", job.optim.rows)):
            if section != type(section)():
                return (
                    f'[{name}] has no effect with model.family = "{job.model.family}": leave it '
                    'out, or use family = "dlrm".'
                )
        return None
    if job.data.source != "clicks":
        return (
            f'model.family = "dlrm" trains on the synthetic click log, but data.source = '
            f'{job.data.source!r}: set data.source = "clicks".'
        )
    if job.layout.precision in ("fp16", "fp8") or job.layout.param_dtype == "fp64":
        return (
            f"the rows of tables are fp32 and have no loss scale, but layout.precision = "
            f'"{job.layout.precision}", layout.param_dtype = "{job.layout.param_dtype}": '
            "use fp32 or bf16."
        )
    return _unused_of_tables(job)


def _unused_of_tables(job: Sections) -> str | None:
    """A setting of the tables that nothing would come of."""
    rows = job.optim.rows
    if rows.kind == "adagrad" and rows.betas != RowOptim().betas:
        return (
            f'optim.rows.betas = {list(rows.betas)} has no effect with kind = "adagrad": leave it '
            'out, or set kind = "adam".'
        )
    embeddings = job.comm.embeddings
    default = type(embeddings)()
    if embeddings.by == "all_to_all":
        for name in ("servers", "mode", "staleness", "cache_rows", "checkpoint_every"):
            if getattr(embeddings, name) != getattr(default, name):
                return (
                    f"comm.embeddings.{name} = {getattr(embeddings, name)!r} has no effect with "
                    'by = "all_to_all": set by = "server" or leave it out.'
                )
    if embeddings.mode == "synchronous" and embeddings.cache_rows:
        return (
            f"comm.embeddings.cache_rows = {embeddings.cache_rows} would use old rows, which mode "
            '= "synchronous" forbids: set it to 0, or mode = "stale".'
        )
    return None
