"""What evaluations of a run may be judged by (`checkpoint.best`): as it is said before it trains,
and as they are."""

from pathlib import Path

from paceline.observe.run import Run
from paceline.train.families import family_of


def must_be_told_before(folder: Path, name: str) -> None:
    """See that a Job tells the figures that the last evaluation of its run has."""
    run = Run(folder / "runs" / name)
    job, line = run.job(), run.metrics()[-1]
    found = {key for key in line if key.startswith("eval_")} - {"eval_s", "eval_figures"}
    found |= line.get("eval_figures", {}).keys()
    assert set(family_of(job.model).eval_figures(job.model, job)) == found
