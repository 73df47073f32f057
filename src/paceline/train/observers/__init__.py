"""Who watches a run: meters, console, loggers, profiler, the record for `paceline verify`."""
