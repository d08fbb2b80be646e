"""Times `pyroclast train` beside PyTorch, in one run on one machine, and prints a Markdown table.

    python benchmarks/train_vs_torch.py --pyroclast target/release/pyroclast [--steps 60] [--warmup 20]

Needs torch, numpy and safetensors. Both sides first replay a golden case; nothing is timed if a loss
is off by more than 1e-5. Then each pairing runs alternately, `--rounds` times, and the median of all
rounds' median step times counts: the machine's mood falls on both alike.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
MODELS = {"gpt-nano": 12, "gpt-mini": 4}  # rows per step, all ranks together


def pyroclast(binary, folder, *flags):
    """Runs a training and returns its training rows."""
    out = pathlib.Path(folder) / f"run-{len(os.listdir(folder))}"
    command = [binary, "train", f"--out={out}", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == "train"]


def verify(binary, folder):
    """Replays a golden case."""
    goldens = json.loads((GOLDEN / "torch.json").read_text())
    model, case = goldens["model"], goldens["cases"][0]
    flags = [f"--{name}={size}" for name, size in model.items()]
    flags += [f"--init-from={GOLDEN / 'init.safetensors'}", f"--data={GOLDEN / 'text.txt'}"]
    flags += [f"--val-split={goldens['val_split']}", "--sampling=sequential"]
    flags += [f"--batch-size={goldens['batch']}", f"--max-steps={goldens['steps']}"]
    flags += [f"--optimizer={case['optimizer']}", f"--lr={case['lr']}"]
    flags += [f"--weight-decay={case['weight_decay']}", f"--gradient-clip-val={case['clip']}"]
    flags += [f"--accumulate-grad-batches={case['accumulate']}"]
    rows = pyroclast(binary, folder, *flags)
    worst = max(abs(row["loss"] - loss) for row, loss in zip(rows, case["losses"], strict=True))
    assert worst < 1e-5, f"pyroclast is off by {worst} in {case['name']}"
    return worst


def ours(binary, folder, text, model, ranks, args):
    rows = pyroclast(
        binary, folder, f"--model={model}", f"--devices={ranks}", f"--data={text}",
        f"--batch-size={MODELS[model] // ranks}", f"--max-steps={args.steps + args.warmup}",
        "--val-check-interval=0",
    )
    return statistics.median(r["step_ms"] for r in rows[args.warmup:]), rows[-1]["peak_rss_bytes"]


def theirs(text, model, ranks, args):
    command = [
        sys.executable, ROOT / "benchmarks" / "torch_train.py", f"--model={model}",
        f"--ranks={ranks}", f"--batch-size={MODELS[model] // ranks}", f"--steps={args.steps}",
        f"--warmup={args.warmup}", f"--text={text}", "--fused", f"--verify={GOLDEN}",
    ]
    # Some machines pin OpenBLAS to an old core; torch's own kernels do not need that.
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    row = json.loads(out.splitlines()[-1])
    return row["median_step_ms"], row["peak_rss_bytes"], row["version"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pyroclast", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    text = GOLDEN / "text.txt"
    context = {"gpt-nano": 64, "gpt-mini": 256}
    with tempfile.TemporaryDirectory() as folder:
        print(f"verified: pyroclast within {verify(args.pyroclast, folder):.1e} of the golden losses")
        print("| model | ranks | | ms per step | tokens/s | peak memory, MiB |")
        print("|---|---|---|---|---|---|")
        for model, rows in MODELS.items():
            for ranks in (1, 2):
                rounds = [
                    (ours(args.pyroclast, folder, text, model, ranks, args), theirs(text, model, ranks, args))
                    for _ in range(args.rounds)
                ]
                version = rounds[0][1][2]
                for side, name in enumerate(("pyroclast", f"torch {version}")):
                    ms = statistics.median(r[side][0] for r in rounds)
                    memory = max(r[side][1] for r in rounds) / 2**20
                    rate = rows * context[model] / ms * 1e3
                    print(f"| {model} | {ranks} | {name} | {ms:.1f} | {rate:,.0f} | {memory:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
