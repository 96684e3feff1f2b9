"""Parts of benchmarks: workloads, contenders, processes, and ways to measure."""
