"""What is asked: documents, queries, judgments, and corpora of every size N."""

BENCHMARKS = {
    "beir": "icr_bench.benchmarks.beir:beir",
    "hotpotqa": "icr_bench.benchmarks.beir:hotpotqa",
    "limit": "icr_bench.benchmarks.limit:limit",
    "msmarco": "icr_bench.benchmarks.beir:msmarco",
    "nq": "icr_bench.benchmarks.beir:nq",
    "packages": "icr_bench.benchmarks.packages:packages",
}
"""Name -> ``module:callable`` that returns a `Benchmark`; the module is imported when the name is chosen."""
