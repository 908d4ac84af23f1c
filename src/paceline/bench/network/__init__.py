"""`paceline bench collectives`: what crosses the links between ranks, and which link is slow.

`bandwidth` has the figures and their definitions, `sizes` what is measured, `sweep` measures the
collectives, `pairs` every rank to every other, `slow` names what is slower than the rest, `show`
and `page` show all of it, `command` puts it together. The exchanges themselves, with their checks,
are those that `paceline bench` measures: `bench.collectives`.
"""
