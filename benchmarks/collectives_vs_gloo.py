"""Times all-reduces of `pyroclast bench collectives` beside torch.distributed's gloo, in one run on one
machine, and prints a Markdown report.

    python benchmarks/collectives_vs_gloo.py --pyroclast target/release/pyroclast [--rounds 3] [--seconds 1]

Needs torch. On both sides ranks are processes that talk over the loopback interface, a result is
verified before anything is timed, every run begins at a barrier, and the slowest rank's time counts.
The two sides run alternately, `--rounds` times, and the median of all rounds' medians counts: the
machine's mood falls on both alike. With `--json` the lines are objects with the keys of
`bench --format json` instead, the rival filled in.
"""

import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
WARM_UP = 3
FEWEST_RUNS = 5


def gloo_rank(seconds):
    """One rank of the rival. Rank 0 prints the median times in microseconds, by size."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    medians = {}
    for size in SIZES:
        buffer = (torch.arange(size // 4) % 11 + rank).float()
        expected = ((torch.arange(size // 4) % 11) * world + sum(range(world))).float()
        dist.all_reduce(buffer)
        assert torch.equal(buffer, expected), f"gloo returned something else for {size} bytes"
        buffer.zero_()

        def run():
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(buffer)
            return time.perf_counter() - started

        warm = torch.tensor(statistics.median(run() for _ in range(WARM_UP)), dtype=torch.float64)
        dist.all_reduce(warm, dist.ReduceOp.MAX)
        runs = min(max(int(seconds / warm.item()), FEWEST_RUNS), 20_000)
        times = torch.tensor([run() for _ in range(runs)], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        medians[size] = statistics.median(times.tolist()) * 1e6
    if rank == 0:
        print(json.dumps({"version": torch.__version__, "median_us": medians}))
    dist.destroy_process_group()


def gloo(args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(args.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--gloo-rank", f"--seconds={args.seconds}"]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(args.world)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "a rank of gloo failed"
    return json.loads(said[0].splitlines()[-1])


def pyroclast(args, transport):
    """The lines of our bench, by size."""
    command = [args.pyroclast, "bench", "collectives", f"--transport={transport}", f"--world={args.world}"]
    command += ["--op=all_reduce", f"--seconds={args.seconds}", "--format=json"]
    command += ["--sizes=" + ",".join(map(str, SIZES))]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["bytes"]: row for row in map(json.loads, out.splitlines())}


def median_row(rounds, size):
    """The round with the median time."""
    rows = sorted((rows[size] for rows in rounds), key=lambda row: row["median_us"])
    assert all(row["verified"] for row in rows)
    return rows[len(rows) // 2]


def machine():
    cpu = platform.machine()
    memory = ""
    for path, key in (("/proc/cpuinfo", "model name"), ("/proc/meminfo", "MemTotal")):
        if not pathlib.Path(path).exists():
            continue
        lines = pathlib.Path(path).read_text().splitlines()
        value = next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
        if key == "MemTotal":
            memory = f", {int(value.split()[0]) / 2**20:.0f} GiB"
        else:
            cpu = value or cpu
    return f"{os.cpu_count()} threads of {cpu}{memory}, {platform.system()} {platform.release()}"


def shown(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def report(args, version, tcp, memory, rival):
    factor = 2 * (args.world - 1) / args.world
    bus = lambda size, us: size / us / 1e3 * factor
    print(f"# All-reduce beside gloo, {args.world} processes on one machine, {time.strftime('%Y-%m-%d')}\n")
    print(f"`python benchmarks/collectives_vs_gloo.py --pyroclast pyroclast --rounds {args.rounds} --seconds {args.seconds:g}`\n")
    print(f"- Machine: {machine()}.")
    print("- f32, sum, over the loopback interface, one connection between two ranks. `memory` is Pyroclast's")
    print("  transport for ranks that are threads, for comparison.")
    print(f"- Rival: gloo of torch {version}.")
    print("- Verified before timing, on both sides, for every size.")
    print("- Each run begins at a barrier, and the slowest rank's time counts; medians over the runs of")
    print(f"  about {args.seconds:g} s per size, and over {args.rounds} alternating rounds. GB/s are bus bandwidth, 1e9 bytes.")
    print(f"- The limit: {tcp[SIZES[-1]]['limit_source']}.\n")
    print("| bytes | pyroclast tcp | gloo | pyroclast tcp | gloo | times as fast | of the limit | pyroclast memory |")
    print("|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        ours, us = tcp[size], rival[size]
        print(
            f"| {shown(size)} | {ours['median_us']:,.0f} µs | {us:,.0f} µs | {ours['busbw_gb_s']:.2f} GB/s "
            f"| {bus(size, us):.2f} GB/s | {us / ours['median_us']:.2f} | {ours['fraction_of_limit']:.0%} "
            f"| {memory[size]['median_us']:,.0f} µs, {memory[size]['busbw_gb_s']:.2f} GB/s |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pyroclast")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gloo-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo_rank:
        gloo_rank(args.seconds)
        return
    if not args.pyroclast:
        parser.error("--pyroclast is needed: the path of the binary")
    rounds = [(pyroclast(args, "tcp"), gloo(args), pyroclast(args, "memory")) for _ in range(args.rounds)]
    tcp = {size: median_row([tcp for tcp, _, _ in rounds], size) for size in SIZES}
    memory = {size: median_row([memory for _, _, memory in rounds], size) for size in SIZES}
    rival = {size: statistics.median(gloo["median_us"][str(size)] for _, gloo, _ in rounds) for size in SIZES}
    version = rounds[0][1]["version"]
    if not args.json:
        report(args, version, tcp, memory, rival)
        return
    for size in SIZES:
        value = size / rival[size] / 1e3 * 2 * (args.world - 1) / args.world
        ratio = tcp[size]["busbw_gb_s"] / value
        print(json.dumps(tcp[size] | {"rival": f"gloo, torch {version}", "rival_value": value, "ratio_to_rival": ratio}))


if __name__ == "__main__":
    main()
