"""A real Slurm on this machine: controller, accounting, and nodes with devices that are fake.

python -m benchmarks.slurmlab -- sinfo --Node

with Laboratory() as lab:
    lab.run("sbatch", "--wrap", "srun hostname")
    lab.kill_node("n1")
"""

from benchmarks.slurmlab.laboratory import Laboratory, why_not

__all__ = ["Laboratory", "why_not"]
