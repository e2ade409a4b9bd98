"""Who measures: suites, runs, metrics, latency, memory, tables and the command line."""
