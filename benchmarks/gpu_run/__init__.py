"""The parts of ``on_gpu.py``: measurements for the first hour on a machine with a GPU."""
