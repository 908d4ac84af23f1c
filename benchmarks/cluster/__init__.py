"""One trace of jobs on a Slurm that takes machines away: Paceline, submitit and TorchX beside each
other. `python -m benchmarks.cluster --help`."""
