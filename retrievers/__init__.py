"""Who answers: everything behind the `Retriever` interface."""

RETRIEVERS = {
    "bm25": "icr_bench.retrievers.bm25:BM25",
    "dense": "icr_bench.retrievers.dense:Dense",
}
"""Name -> ``module:class``; the module is imported when the name is chosen."""
