"""Who is compared with whom: the peers, workloads, parts and page of `bench/run.py`, and the disks
and programs of `bench/databases.py` and `bench/shapes.py`."""
