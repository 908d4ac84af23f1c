"""Retrieval: answers from documents.

| module | what |
|---|---|
| documents | files as documents, and documents as chunks |
| encoder | texts as vectors, by a network of ours or one of transformers |
| folder | what an index is on disk: written whole or not at all, verified before it is used |
| lists | the vectors, searched by faiss: lists of neighbours, mapped from disk or in memory |
| build | an index from documents |
| retriever | searches for many requests beside the engine |
"""
