"""What `bench/run.py` alone measures: its peers, workloads and parts, and its page."""
