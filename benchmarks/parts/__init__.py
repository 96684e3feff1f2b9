"""What benchmarks are made of: what they train, beside what they run it, who takes part, and how they measure."""
