"""Runs on machines that somebody else hands out: a scheduler, a list of hosts, this machine.

Paceline schedules nothing. It chooses the size, writes what the scheduler takes, says why a job
waits, and accounts for each device-second. No torch here.
"""
