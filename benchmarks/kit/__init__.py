"""What benchmarks have in common: bars and reports, rounds of contestants, emulated ranks, models."""
