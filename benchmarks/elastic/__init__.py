"""What a lost rank or node costs a run: ours, torchft, torchrun, NVRx, on nodes played by one host.

| module | what |
|---|---|
| outages | stamps of steps -> how long a run stood still, what it did again (pure) |
| contestants | how each is started on the nodes of a laboratory, as its documentation has it |
| entry | `paceline` with stamps and notes of steps, and faults, put into its ranks |
| faults | what goes wrong inside a rank at a phase of the run |
| jobs | the Job of a benchmark, with the speed of this host written in |
| agents | `paceline train` as agents of nodes that are plain processes |
| history | what a run left behind -> which rules it broke (pure) |

`python -m benchmarks.elastic` measures; `benchmarks/elastic_soak.py` kills a hundred times and
checks; `benchmarks/elastic_faults.py` goes through faults x ranks x phases.
"""
