"""A parameter server: rows of embedding tables held by processes beside the ranks.

A server (`server`, one process each, numpy only) holds the rows that a consistent hash gives it
(`consistent_hash`), updates them itself (`rows`) and keeps checkpoints of its own (`snapshot`). A
worker pulls the rows of its batch and pushes their gradients (`client`), perhaps out of a cache of
hot rows (`cache`). `supervisor` starts servers and brings a dead one back. `tables` is what
training sees: rows by server, or whole tables held by the ranks themselves and exchanged by
all-to-all.

The transport is Python's own `multiprocessing.connection`: framed messages over TCP on one given
interface, both ends proving that they know the run's random key; nothing is pickled (`wire`).
torch.distributed.rpc does the same with pickled Python calls, and is in maintenance mode (its
documentation since 2.9; TensorPipe's README since December 2025); a process that died can't come
back into its group under its old name, which is what a server has to do.

Papers: parameter server, Li et al., OSDI 2014; bounded staleness, Ho et al., NIPS 2013; consistent
hashing, Karger et al., STOC 1997.
"""
