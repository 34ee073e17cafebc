"""Plain DDP under torchrun, written like its tutorial; `data_parallel.py` times it.

Arguments: examples of a batch over all processes, number of steps, steps per figure. Rank 0 prints
one line of examples per second for each figure.
"""
# ruff: noqa: TID251 (a program of torch's own kind, without fedlearn)

import os
import sys
import time

import torch
import torch.distributed as dist
from data_parallel import network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and print examples per second."""
    batch_size, num_steps, every = (int(each) for each in sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(4096, 256, generator=generator)
    labels = torch.randint(0, 10, (4096,), generator=generator)
    share, num_batches = batch_size // world_size, len(labels) // batch_size
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order, began_s = torch.randperm(len(labels), generator=generator), time.perf_counter()
    for step in range(num_steps):
        first = (step % num_batches) * batch_size + rank * share
        rows = order[first : first + share]
        optimizer.zero_grad()
        loss = cross_entropy(model(features[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if (step + 1) % every == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            now_s = time.perf_counter()
            if rank == 0:
                print(batch_size * every / (now_s - began_s), flush=True)
            began_s = now_s
    dist.destroy_process_group()
    # A gloo thread that still runs while the interpreter exits would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
