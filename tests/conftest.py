"""One thread per test process: the tests run in parallel, and threads that wait for each other's cores crawl."""

import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

# What engine="fastest" remembers is not the user's, nor that of another run of the tests.
os.environ["VECGYM_CACHE"] = tempfile.mkdtemp(prefix="vecgym-tests-")

import torch

torch.set_num_threads(1)
