"""Checkpoints that are written beside training, complete or absent, and load on any layout.

    checkpointer = Checkpointer(run / "checkpoints", keep_last=2, say=print)
    if found := checkpointer.latest_good():
        state = training_state(module, optimizer, found)
        facts = checkpointer.load(found, state)
        restore_training_state(module, optimizer, state)
    ...
    waited_s = checkpointer.save(step, training_state(module, optimizer), facts)

`state` names what makes up a training state, `plan` divides it over the ranks, `files` is the
format on disk, `lockstep` makes ranks fail together, `loading` reads, and `checkpointer` puts the
writing in order. `copies` copies what is complete to a `store`. Without the disk: `held` is what a
rank has of a state, in `regions`, `buddies` copies it into another node's memory, and `memory` puts
it together again.
"""
