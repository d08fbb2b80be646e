"""
Times in PyTorch, on the CPU in float32, the training that `pyroclast train` does.

    python benchmarks/torch_train.py --model gpt-mini --text tests/golden/text.txt --verify tests/golden
    python benchmarks/torch_train.py --model gpt-mini --text tests/golden/text.txt --ranks 2

Prints one line of JSON. A step is everything from slicing the batch to the updated weights. Two ranks
are two processes under DistributedDataParallel with gloo, and share the cores evenly.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "torch"))
from gpt import GPT, PRESETS, load_text, make_optimizer, train_step


def gather(x, world):
    """The list of every rank's `x`, on every rank."""
    xs = [x]
    if world > 1:
        xs = [None] * world
        dist.all_gather_object(xs, x)
    return xs


def train(model, optimizer, data, context, steps, batch, rank, world):
    """Trains for some steps; returns the losses (means over the ranks) and the seconds of each step."""
    run = DistributedDataParallel(model) if world > 1 else model
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        loss, _ = train_step(
            run, optimizer, data, context, step * world * batch, batch, clip=None, rank=rank, world=world
        )
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
    losses = [statistics.fmean(ls) for ls in zip(*gather(losses, world))]
    return losses, seconds


def verify(folder, args, rank):
    """Replays a golden case as it will be timed, its batch split over the ranks, and compares the losses."""
    folder = Path(folder)
    golden = json.loads((folder / "torch.json").read_text())
    case = next(c for c in golden["cases"] if (c["optimizer"], c["clip"], c["accumulate"]) == ("adamw", 0, 1))
    context, batch = golden["model"]["context"], golden["batch"] // args.ranks
    model = GPT(**golden["model"], sdpa=args.sdpa)
    model.load_state_dict(load_file(folder / "init.safetensors"))
    data, _ = load_text(folder / "text.txt", golden["val_split"])
    optimizer = make_optimizer(model, "adamw", case["lr"], args.fused)
    losses, _ = train(model, optimizer, data, context, golden["steps"], batch, rank, args.ranks)
    worst = max(abs(a - b) for a, b in zip(losses, case["losses"], strict=True))
    assert worst <= 1e-4, f"{case['name']}: a loss is {worst:.1e} away from the golden one"
    if rank == 0:
        print(f"verified {case['name']}: losses within {worst:.1e} of the golden ones", file=sys.stderr)


def worker(rank, args, threads, rendezvous):
    torch.set_num_threads(threads)
    if args.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    if args.verify:
        verify(args.verify, args, rank)

    torch.manual_seed(1234)  # the same weights on every rank
    preset = PRESETS[args.model]
    model = GPT(**preset, sdpa=args.sdpa)
    data, _ = load_text(args.text, args.val_split)
    optimizer = make_optimizer(model, "adamw", 1e-3, args.fused)
    steps = args.warmup + args.steps
    losses, seconds = train(model, optimizer, data, preset["context"], steps, args.batch_size, rank, args.ranks)

    # ru_maxrss is in KiB, except on macOS
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    rss = gather(rss, args.ranks)
    median = statistics.median(seconds[args.warmup :])
    if rank == 0:
        result = dict(
            framework="torch",
            version=torch.__version__,
            model=args.model,
            ranks=args.ranks,
            batch_size=args.batch_size,
            threads_per_rank=threads,
            sdpa=args.sdpa,
            fused=args.fused,
            steps=args.steps,
            median_step_ms=round(median * 1e3, 3),
            tokens_per_s=round(args.ranks * args.batch_size * preset["context"] / median, 1),
            peak_rss_bytes=sum(rss),
            peak_rss_bytes_per_rank=rss,
            first_loss=losses[0],
            last_loss=losses[-1],
        )
        print(json.dumps(result), flush=True)
    if args.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time a GPT training in PyTorch on the CPU.")
    parser.add_argument("--model", choices=PRESETS, default="gpt-nano")
    parser.add_argument("--text", required=True, metavar="FILE", help="the training text")
    parser.add_argument("--batch-size", type=int, default=12, help="rows of a micro-batch, per rank")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those, not timed")
    parser.add_argument("--val-split", type=float, default=0.1, help="the part at the end left out of training")
    parser.add_argument("--sdpa", action=argparse.BooleanOptionalAction, default=True, help="torch's own attention")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    parser.add_argument("--verify", metavar="GOLDEN_DIR", help="first replay a case of tests/golden")
    args = parser.parse_args()

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, cores // args.ranks)
    if args.ranks == 1:
        worker(0, args, threads, None)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.spawn(worker, (args, threads, os.path.join(tmp, "rendezvous")), nprocs=args.ranks)
