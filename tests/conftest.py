"""One thread per test process: the tests run in parallel, and threads that wait for each other's cores crawl."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

import torch

torch.set_num_threads(1)
