"""One rank of an all-reduce through PyTorch's Gloo, on the CPU.

Started once for each rank by `tensord-bench allreduce`, which measures tensord in
the same way: all ranks ready, some all-reduces one after the other, all ranks done.
Rank 0 prints the seconds of each sample as one line of JSON. Needs PyTorch alone.
"""

import argparse
import datetime
import json
import time

import torch
import torch.distributed as dist

ELEMENTS_PER_MIB = (1 << 20) // 4
TIMEOUT = datetime.timedelta(seconds=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="HOST:PORT, served by rank 0")
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("sizes", nargs="+", help="MIB:REPETITIONS")
    options = parser.parse_args()

    # The ranks share the machine's cores.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.store}",
        rank=options.rank,
        world_size=options.world,
        timeout=TIMEOUT,
    )
    for size in options.sizes:
        mib, repetitions = (int(part) for part in size.split(":"))
        measure(mib, repetitions, options)
    dist.barrier()
    dist.destroy_process_group()


def measure(mib, repetitions, options):
    ranks = options.world * (options.world + 1) / 2
    tensor = torch.full((mib * ELEMENTS_PER_MIB,), float(options.rank + 1))
    dist.all_reduce(tensor)
    if not bool((tensor == ranks).all()):
        raise SystemExit(f"the sum of {ranks} is wrong")
    # The first run warms up, and does not count.
    for run in range(options.runs + 1):
        tensor.fill_(1.0)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(repetitions):
            dist.all_reduce(tensor)
        dist.barrier()
        seconds = (time.perf_counter() - begun) / repetitions
        if options.rank == 0:
            told = {"mib": mib, "run": run, "seconds": seconds}
            print("serving " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
