"""Serving, planned: how many machines a load needs, what they cost, and what its users wait for.

| module | what |
|---|---|
| load, slo | requests as they come, what became of them, and what was promised |
| costs | seconds of an engine's step by what it computes, in terms that sum up |
| measured, catalogue | these costs from measured steps, or from a device's curves |
| simulate | the engine's own scheduler, with a clock instead of a network |
| search | replicas, tensor parallelism, batch and precision: the cheapest that keeps a promise |
| options, command, show | `paceline plan --serve` |
"""
