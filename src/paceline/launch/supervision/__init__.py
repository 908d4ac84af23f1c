"""Jobs without a scheduler: a supervisor of our own on the machine that launches.

A job has a process that keeps it (`supervisor`), on each node a script that keeps the command for
as long as it hears from that process (`relay`), and records in its folder (`state`).
"""
