"""Give Slurm a job, or leave nothing behind, whatever happens in between.

A shell in a session of its own submits the job held, says its id, and waits for a word: then it
releases the job. Where this process ends before (its end of the pipe closes) the shell cancels the
job, so nothing is ever queued that nobody knows of. A job can't start before its id is written.
"""

import os
import re
import select
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator

from paceline.launch.contract import ID_FILE, Rendered, Request, Submitted
from paceline.launch.engines.slurm.commands import (
    PATIENCE_S,
    ask,
    environment,
    no_answer,
    no_slurm,
    refused,
    run,
)
from paceline.launch.engines.slurm.queue import estimate, must_end_in_time
from paceline.launch.engines.slurm.script import job_name
from paceline.launch.job_folder import job_folder
from paceline.observe.run import write_atomic

_SUBMIT = """\
job=$(sbatch --parsable --hold "$@") || exit 1
job=${job%%;*}
echo "$job"
read -r go && scontrol release "$job" && exit
scancel "$job"
exit 1
"""


def submit(request: Request, rendered: Rendered) -> Submitted:
    """Write the files, and queue the job.

    Raises:
        InputError: Slurm refuses it, can't be asked, or the folder can't be written; nothing is
            left of it.
    """
    # Such as more nodes than there are: sbatch itself would take it, and let it wait for ever.
    must_end_in_time(rendered.files[rendered.main])
    estimate(rendered.files[rendered.main])
    with job_folder(request, rendered):
        job = _queue(request, rendered)
    if request.priority > 0:
        # Where the site lets people order their own jobs (enable_user_top); else it stays.
        run("scontrol", "top", job)
    return Submitted(job, request.folder)


def _queue(request: Request, rendered: Rendered) -> str:
    if shutil.which("sbatch") is None:
        raise no_slurm("sbatch")
    command = ["sh", "-c", _SUBMIT, "-", *_lane(request), rendered.main]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=request.folder,
        env=environment(),
        start_new_session=True,
    ) as shell:
        try:
            assert shell.stdout is not None
            is_there = select.select([shell.stdout], [], [], PATIENCE_S)[0]
            job = shell.stdout.readline().strip() if is_there else ""
            if job:
                write_atomic(request.folder / ID_FILE, job)
            said = shell.communicate("go\n" if job else "", PATIENCE_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            raise no_answer("sbatch") from None
    if shell.returncode != 0:
        raise refused(said)
    return job


def _lane(request: Request) -> Iterator[str]:
    """Jobs of one name follow each other (singleton): so many names, so many that run at once."""
    if request.at_most is None:
        return
    base = job_name(request) if not request.group else re.sub(r"[^\w.-]+", "_", request.group)[:80]
    waiting = Counter(ask("squeue", "--me", "--noheader", "--format=%j").splitlines())
    lanes = [f"{base}-lane{at + 1}" for at in range(request.at_most)]
    yield f"--job-name={min(lanes, key=lambda lane: waiting[lane])}"
    after = f"afterok:{':'.join(request.after)}," if request.after else ""
    yield f"--dependency={after}singleton"
