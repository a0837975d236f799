"""The lab starts the real servers that tests, benchmarks and demos use."""
