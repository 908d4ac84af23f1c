"""Is this machine fit to train on? Each finding with its fix.

| module | what |
|---|---|
| readings | what a machine says, as texts by name: read here, or from a saved folder |
| nvidia, amd, infiniband, nccl_log, system, software | understand one kind of text each, pure |
| facts | all of it together |
| checks | judge the facts, a small pure function each; its table is docs/doctor.md |
| storage | writes and reads a file of bounded size |
| command | `paceline doctor` |
"""
