"""Does `paceline explain` name the cause of a slow run, and what mending it gives?

How it works: a fault is put into a real run on 1 to 4 gloo ranks, as a setting of the Job or as
something that happens inside a rank (`inject`), never into what is recorded. The faulty run and its
mended twin both stand ready and take turns of eight steps, so that a slower minute of the machine
hits both; they go on until the gain is known well enough. The gain of mending is one less the ratio
of their seconds per step, over steps that were not profiled. Then the faulty Run is explained, by
its files alone: does the first finding name the fault, and how far is its estimate from the gain
that was measured? Healthy runs must find nothing worth 3 %. A seed draws the strength of each fault
and the rank that has it.

What a gain is worth depends on the machine: so do the results, which name theirs.

    python -m benchmarks.diagnosis [--fault NAME] [--seed S] [--quick]
"""
