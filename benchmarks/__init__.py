"""Benchmarks: measurements that stand in results/, each with its command, hardware, versions and date."""
