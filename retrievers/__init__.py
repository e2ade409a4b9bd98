"""Who answers: everything behind the `Retriever` interface."""

RETRIEVERS = {
    "api": "icr_bench.retrievers.api:Api",
    "attention": "icr_bench.retrievers.attention:Attention",
    "blocksearch": "icr_bench.retrievers.blocksearch:BlockSearch",
    "blocksearch-offpolicy": "icr_bench.retrievers.blocksearch:offpolicy",
    "blocksearch-position": "icr_bench.retrievers.blocksearch:position",
    "blocksearch-routing": "icr_bench.retrievers.blocksearch:routing",
    "blocksearch-sink": "icr_bench.retrievers.blocksearch:sink",
    "blocksearch-ssmax": "icr_bench.retrievers.blocksearch:ssmax",
    "blocksearch-ssmax-routing": "icr_bench.retrievers.blocksearch:ssmax_routing",
    "bm25": "icr_bench.retrievers.bm25:BM25",
    "dense": "icr_bench.retrievers.dense:Dense",
    "dense-tiny": "icr_bench.retrievers.dense:tiny",
    "hybrid": "icr_bench.retrievers.combine:Hybrid",
    "late": "icr_bench.retrievers.late:Late",
    "lucene": "icr_bench.retrievers.lucene:Lucene",
    "mteb": "icr_bench.retrievers.mteb:Mteb",
    "rerank": "icr_bench.retrievers.combine:Rerank",
}
"""Name -> ``module:class``; the module is imported when the name is chosen."""
