"""A person's own module, loss and data: what becomes of them before the loop sees a Task.

`feed` reads the data. `sample_order` says which samples come when, as a pure function of the seed.
`isolated_rng` keeps random numbers apart. `collate` collates, cuts and moves batches. `loss` reads
what a loss returned. `task` puts these together. The call itself is `paceline.train.api`.
"""
