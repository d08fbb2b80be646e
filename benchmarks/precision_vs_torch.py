"""Trains gpt-nano in each precision with `pyroclast train` and with PyTorch under autocast, from the same
weights on the same windows, and prints the losses as a Markdown table.

    python benchmarks/precision_vs_torch.py --pyroclast target/release/pyroclast [--steps 300]

Needs torch, numpy and safetensors. Both sides first replay a golden case. Exits with an error if a mixed
precision of Pyroclast that skipped no step ends further than 1 percent from its f32 validation loss: a step that
is skipped because the first loss scale is too large is one step less of training, in torch as well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tests" / "torch"))
from gpt import GPT, PRESETS, evaluate, load_text, make_optimizer, windows, num_windows
from train_vs_torch import verify

BATCH, VAL_SPLIT, LR = 12, 0.1, 1e-3
# By name, and the first loss scale.
RUNS = [("32-true", None), ("bf16-mixed", None), ("16-mixed", 4096), ("16-mixed", 65536), ("bf16-true", None), ("16-true", 4096)]
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def ours(binary, folder, precision, scale, steps):
    """The training losses, the validation loss, and how many steps were skipped."""
    out = Path(folder) / f"{precision}-{scale}"
    command = [
        binary, "train", "--model=gpt-nano", f"--out={out}", f"--precision={precision}",
        f"--init-from={Path(folder) / 'init.safetensors'}", f"--data={GOLDEN / 'text.txt'}",
        f"--val-split={VAL_SPLIT}", "--sampling=sequential", f"--batch-size={BATCH}", f"--lr={LR}",
        f"--max-steps={steps}", f"--val-check-interval={steps}", "--limit-val-batches=100000",
    ]
    if scale:
        command.append(f'--loss-scale={json.dumps(dict(torch=dict(init_scale=scale)))}')
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
    train = [row for row in rows if row["split"] == "train"]
    val = [row["loss"] for row in rows if row["split"] == "val"][-1]
    return [row["loss"] for row in train], val, sum(row["skipped"] for row in train)


def theirs(initial, dtype, scale, steps):
    """The same in torch, under autocast."""
    train, val = load_text(GOLDEN / "text.txt", VAL_SPLIT)
    model = GPT(**PRESETS["gpt-nano"])
    model.load_state_dict(initial)
    optimizer = make_optimizer(model, "adamw", LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 65536.0, enabled=dtype == torch.float16)
    context, n = PRESETS["gpt-nano"]["context"], num_windows(train, PRESETS["gpt-nano"]["context"])
    losses, skipped = [], 0
    for step in range(steps):
        batch = windows(train, context, [(step * BATCH + b) % n for b in range(BATCH)])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(*batch)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return losses, evaluate(model, val, context, BATCH), skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pyroclast", required=True)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(1234)
    initial = GPT(**PRESETS["gpt-nano"]).state_dict()
    at = sorted({1, 10, 50, *range(100, args.steps + 1, 100), args.steps})
    with tempfile.TemporaryDirectory() as folder:
        print(f"verified: pyroclast within {verify(args.pyroclast, folder):.1e} of the golden losses")
        save_file(initial, Path(folder) / "init.safetensors")
        steps = " | ".join(f"step {step}" for step in at)
        print(f"| precision | | {steps} | validation | to f32 | skipped |")
        print("|---|---|" + "---|" * (len(at) + 3))
        reference, failed = {}, []
        for precision, scale in RUNS:
            runs = [("pyroclast", *ours(args.pyroclast, folder, precision, scale, args.steps))]
            if precision in AUTOCAST:
                runs.append((f"torch {torch.__version__}", *theirs(initial, AUTOCAST[precision], scale, args.steps)))
            name = f"{precision}, scale from {scale}" if scale else precision
            for side, losses, val, skipped in runs:
                change = val / reference.setdefault(side, val) - 1
                is_ours = side == "pyroclast" and precision.endswith("mixed") and not skipped
                if is_ours and abs(change) > 0.01:
                    failed.append(name)
                shown = " | ".join(f"{losses[step - 1]:.4f}" for step in at)
                print(f"| {name} | {side} | {shown} | {val:.4f} | {change:+.2%} | {skipped} |", flush=True)
    if failed:
        sys.exit(f"more than 1 percent from f32: {', '.join(failed)}")


if __name__ == "__main__":
    main()
