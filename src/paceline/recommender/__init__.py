"""The recommender: embedding tables too large for one rank, and the dense network over them.

| module | what |
|---|---|
| dlrm | the dense network (DLRM): dense features and rows of tables to the logit of a click |
| parameter_server | the tables: rows on servers, or whole tables on ranks by all-to-all |
| click_log | a synthetic click log whose best possible AUC is known |

Not here: its shapes and settings (`config.recommender`), which a Job holds, and its task
(`train.recommendation`), which needs the trainer's vocabulary.
"""
