"""Index: what is known of all runs of a folder, in one SQLite file beside them.

It is made from the Run directories and holds nothing else: deleting it loses nothing. Each look
brings it up to date, and reads again only runs of which a file is another one than last time. Two
commands may do so at once (WAL; each run is written in one transaction). A file that is no index,
or a damaged one, is made anew. Where the folder can't be written, it is made in memory.

Tables are for people and programs that ask by SQL, too; their columns are the fields of `RunRow`
and of the records in `launch.run_facts`.
"""

INDEX_FILE = ".index.sqlite"
_VERSION = 1
_PATIENCE_S = 30.0
"""So long a command waits for another one that writes."""
_TABLES = {
    "attempts": "number, submitted, started, ended, num_devices, exit_code, state",
    "checkpoints": "step, bytes, sha256, time, is_latest, is_best",
    "exports": "step, folder, dtype, time, checkpoint",
    "evaluations": "step, figure, value",
    "tags": "tag",
}
