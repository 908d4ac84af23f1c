"""From what a person asked for to a Run that may begin: everything that can be refused early.

Wrong input must cost a second, leave nothing behind and name the way out, so the order is: resolve,
read the inputs, compare with the checkpoints that are already there, and only then write.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from filelock import FileLock, Timeout

from paceline.comm.rank_env import ranks_from_env
from paceline.config.errors import InputError
from paceline.config.job import Job, JobSpec, to_raw, to_toml
from paceline.kernels import launch
from paceline.machine.cpu_speed import with_speed
from paceline.observe.events import append_event
from paceline.observe.locks import RUN_LOCK
from paceline.observe.run import Run
from paceline.observe.stored import trouble_text
from paceline.observe.trackers import require_installed
from paceline.plan.answer.answer import prediction_json, runtime_json
from paceline.plan.families import family_of as plan_family_of
from paceline.plan.resolve import Plan
from paceline.plan.search.choose import unsearchable, with_prediction
from paceline.train.best_evaluation import BestEvaluation, must_be_figure
from paceline.train.checkpoint.copies import CheckpointCopies
from paceline.train.checkpoint.files import newest_facts
from paceline.train.checkpoint.store import CheckpointStore, fetch_newer
from paceline.train.families import family_of

# Of the layouts that the plan of a run tells about, the best ones.
_NUM_ALTERNATIVES = 20
# A launcher killed a moment ago may still be on its way out.
_LOCK_PATIENCE_S = 2.0


def with_measured_speed(plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan with this CPU's measured speed and what it predicts, where nobody gave it.

    Measured is by the process that starts the ranks; one of ranks that a launcher gave would
    measure while others train, and uses what is kept.
    """
    cluster, given = plan.job.cluster, ranks_from_env(plan.job.cluster.device.kind)
    device = with_speed(cluster.device, cluster.devices_per_node, say, may_measure=given is None)
    if device == cluster.device:
        return plan
    job = plan.job.replace(cluster=cluster.replace(device=device))
    notes = tuple(filter(None, [unsearchable(job)]))
    return with_prediction(replace(plan, job=job, notes=notes))


def read_inputs(
    job: Job,
    progress: Callable[[int, int], None],
    say: Callable[[str], None] = lambda _line: None,
) -> str | None:
    """Read what the Job trains on, so that the ranks find it ready.

    Args:
        progress: called with the bytes tokenised so far and those of the whole source.
        say: called with a line where more is held out than was asked for.

    Returns:
        what names the data, None for a person's own.

    Raises:
        InputError: text, tokenizer or starting weights don't fit the Job, one's own table of
            launches is none, a tracker is not installed, there is nothing that could be audited, or
            evaluations are to be judged by a figure that they won't have.
    """
    must_be_auditable(job)
    require_installed(job.observe.trackers)
    launch.table()  # refuses one's own that is none, before anything is written
    must_be_judged_by_figure(job)
    return family_of(job.model).read_inputs(job.model, job, progress, say)


def must_be_judged_by_figure(job: JobSpec) -> None:
    """Refuse to judge evaluations by a figure that they won't have, as far as it is known before.

    Raises:
        InputError: one sentence.
    """
    best = job.checkpoint.best
    if best is None:
        return
    figures = family_of(job.model).eval_figures(job.model, job)
    if figures is not None:
        must_be_figure(best, figures)


def must_be_auditable(job: Job) -> None:
    """Refuse audits where ranks don't compute the same thing.

    Raises:
        InputError: one sentence.
    """
    if not job.elastic.audit_every:
        return
    setting = f"elastic.audit_every = {job.elastic.audit_every}"
    for axis in ("tp", "pp", "cp", "ep"):
        if (value := getattr(job.layout, axis)) != 1:
            raise InputError(
                f"{setting} compares ranks that hold the same network, which layout.{axis} = "
                f"{value} cuts: set {axis} = 1, or audit_every = 0."
            )
    if job.layout.num_ranks == 1:
        raise InputError(f"{setting} compares ranks, and there is one: set it to 0.")
    for name, is_used in (
        ("layout.compile = true", job.layout.compile),
        (f'comm.local.method = "{job.comm.local.method}"', job.comm.local.method != "none"),
        (f'model.family = "{job.model.family}"', job.model.has_tables),
    ):
        if is_used:
            raise InputError(
                f"{setting} needs gradients that another rank can compute bit by bit, and with "
                f"{name} it can't: leave one of them out."
            )


def identity(job: JobSpec, data_key: str | None) -> dict[str, Any]:
    """What may not change under a Run's checkpoints: the model, what of it is trained, and which
    samples come when."""
    return {
        "model": to_raw(job.model),
        "finetune": to_raw(job.finetune.replace(dropout=0.0, adapters=None)),
        "data": data_key,
        "data.temperature": job.data.temperature,
        "data.sources": [
            [each.name, each.weight, each.epochs, each.max_epochs] for each in job.data.sources
        ],
        "data.stages": [to_raw(each) for each in job.data.stages],
        "train.seed": job.train.seed,
        "train.seq_len": job.train.seq_len,
        "train.global_batch": job.train.global_batch,
    }


@contextmanager
def locked_run(run: Run) -> Iterator[None]:
    """Own a Run directory for the life of this process.

    Raises:
        InputError: another live process trains in it.
    """
    made = not run.path.exists()
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run.path / RUN_LOCK, timeout=_LOCK_PATIENCE_S)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{run.path} is in use by another live process: wait for it, stop it, or give this "
            "Job another name (--set name=...)."
        ) from None
    except OSError as error:
        raise InputError(f"{run.path} can't be written: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()
        if made and not run.exists:
            shutil.rmtree(run.path, ignore_errors=True)


def begin_run(
    run: Run,
    plan: Plan,
    data_key: str | None,
    before: Job | None,
    *,
    fresh: bool,
    since: float | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Write the Job and its plan into an owned Run, if it trains with them.

    Args:
        say: called with a sentence for a person, where a store of checkpoints has some.
        since: unix time of this start; a wish to stop that came later stands. None: none does.
        before: what the Run was trained as until now; None: nothing that can be read says so.
        fresh: forget what an earlier start left there.

    Returns:
        whether there is anything left to train; where there isn't, what is written stays true.

    Raises:
        InputError: the Run's checkpoints belong to something else, or their store can't be read.
    """
    copy_to = plan.job.checkpoint.copy_to
    store = None if copy_to is None else CheckpointStore(copy_to, run.path.name)
    if since is None or not was_asked_to_stop(run, since):
        run.stop_file.unlink(missing_ok=True)
    wanted = identity(plan.job, data_key)
    if store is not None and fresh:
        _empty_store(store)
    if fresh:
        _empty(run)
    elif store is not None:
        must_continue = partial(_must_continue, store.url, wanted)
        fetch_newer(store, run.checkpoint_folder, must_continue, say)
    _must_continue(str(run.path), wanted, newest_facts(run.checkpoint_folder))
    done, best = progress_of(run, plan.job)
    is_left = not best.is_finished(done)
    if is_left or before is None:
        run.write("job.toml", to_toml(plan.job))
        _write_plan(run, plan)
    run.note_launch()
    if store is not None and done and not is_left:  # its last start may have ended before it had
        copies = CheckpointCopies(store, run.checkpoint_folder, lambda _steps, _newest: [])
        copies.offer(done, is_new=False)
        copies.finish()
        for sentence in copies.take_sentences():
            say(sentence)
    if is_left and not plan.job.elastic.is_on:  # of those agents tell
        began = time.time() if since is None else since
        append_event(run, "start", began=began, step=done, num_devices=plan.job.layout.num_ranks)
    return is_left


def must_have_steps_left(run: Run, job: JobSpec) -> None:
    """Refuse a Job of which a Run's checkpoints show, before any data is read, that a start of it
    would be refused, or find nothing to train.

    Raises:
        InputError: they are of another training, or of its last step.
    """
    wanted = identity(job, None)
    del wanted["data"]
    anew = "give the Job another name (--set name=...)"
    _must_continue(str(run.path), wanted, newest_facts(run.checkpoint_folder), anew)
    done, best = progress_of(run, job)
    # A start would finish copies to a store that its last one left.
    if done and best.is_finished(done) and job.checkpoint.copy_to is None:
        raise InputError(
            f"{run.path} is complete after {done} steps: train on with --set train.steps="
            f"{2 * done}, or {anew}."
        )


def was_asked_to_stop(run: Run, since: float) -> bool:
    """Whether somebody wished so after a moment (unix time), by the clock of the Run's disk."""
    try:
        return run.stop_file.stat().st_mtime >= since
    except OSError:
        return False


def progress_of(run: Run, job: JobSpec) -> tuple[int, BestEvaluation]:
    """Steps that a Run has done, and its best evaluation as a Job judges it."""
    facts, best = newest_facts(run.checkpoint_folder), BestEvaluation(job)
    step = facts.get("step", 0)
    best.load(facts.get("best", {}), lambda: run.has_evaluation(step))
    return step, best


def _write_plan(run: Run, plan: Plan) -> None:
    """Why the Job is what it is, and what is expected of it: by terms, and as a Timeline."""
    model = plan.job.model
    family = plan_family_of(model)
    predicted = [prediction_json(one, model.unit) for one in plan.ranked[:_NUM_ALTERNATIVES]]
    run.write_json(
        "plan.json",
        {
            "reasons": dict(plan.reasons),
            "notes": list(plan.notes),
            "runtime": runtime_json(plan.job.cluster),
            "layouts": predicted,
        },
    )
    if predicted and (timeline := family.timeline(model, plan.job)) is not None:
        run.trace_folder.mkdir(exist_ok=True)
        timeline.write(run.trace_folder / "predicted.json.gz")


def _empty(run: Run) -> None:
    """Delete a Run's own files; a folder that never was a Run is left alone, and so is what says
    how it was launched: this start may be one of those."""
    if not run.exists:
        return
    for path in run.path.iterdir():
        if path in (run.path / RUN_LOCK, run.stop_file, run.launch_folder):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _empty_store(store: CheckpointStore) -> None:
    """Delete the run's copies, which another machine would go on from."""
    try:
        for step in store.steps():
            store.remove(step)
    except Exception as error:
        raise InputError(
            f"--fresh can't delete the checkpoints in {store.url} ({trouble_text(error)}): mend "
            "checkpoint.copy_to or its credentials, or leave it out."
        ) from None


def _must_continue(
    where: str,
    wanted: dict[str, Any],
    facts: dict[str, Any],
    anew: str = "give the Job another name (--set name=...), or start over with --fresh",
) -> None:
    step = facts.get("step", 0)
    saved, wanted = _as_of(step, facts.get("identity", {})), _as_of(step, wanted)
    changed = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    if not changed:
        return
    name = changed[0]
    old, new = saved[name], wanted[name]
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        name, old, new = f"{name}.{key}", old.get(key), new.get(key)
    what = f"{name} ({old} before, {new} now)"
    if name == "data":
        what = "the text, its tokenizer or its order"
    raise InputError(
        f"{where} has checkpoints of another training: {what} changed; change it back, or {anew}."
    )


def _as_of(step: int, identity: dict[str, Any]) -> dict[str, Any]:
    """Without stages of a mixture that are still to come: those may change."""
    stages = identity.get("data.stages")
    if stages is None:  # of an earlier version
        return identity
    return {**identity, "data.stages": [each for each in stages if each["from_step"] < step]}
