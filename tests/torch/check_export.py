"""
Trains a GPT with `pyroclast train`, exports its checkpoint, and checks that PyTorch loads it strictly and finds the
same validation loss; and that what PyTorch then saves is imported and exported again as the same bits.

    python tests/torch/check_export.py --pyroclast target/release/pyroclast
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from gpt import GPT, evaluate, load_text
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
MODEL = dict(layers=2, heads=2, width=32, context=16)
BATCH, VAL_SPLIT = 4, 0.1
WAYS = [
    ["--devices=1"],
    ["--devices=2", "--strategy=zero3"],
    ["--devices=3", "--strategy=zero1", "--precision=bf16-mixed"],
    ["--devices=2", "--strategy=fsdp", "--precision=64-true"],
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pyroclast", required=True)
    binary = parser.parse_args().pyroclast
    _, val = load_text(GOLDEN / "text.txt", VAL_SPLIT)
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            run, file = Path(folder) / "run", Path(folder) / "weights.safetensors"
            sizes = [f"--{name}={size}" for name, size in MODEL.items()]
            settings = [f"--data={GOLDEN / 'text.txt'}", f"--val-split={VAL_SPLIT}", f"--batch-size={BATCH}"]
            limits = ["--max-steps=20", "--val-check-interval=20", "--limit-val-batches=100000", f"--out={run}"]
            quiet = dict(check=True, stdout=subprocess.DEVNULL)
            subprocess.run([binary, "train", *sizes, *settings, *limits, *way], **quiet)
            subprocess.run([binary, "checkpoint", "export", f"--from={run}", f"--to={file}"], **quiet)
            rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            ours = [row["loss"] for row in rows if row["split"] == "val"][-1]
            weights = load_file(file)
            model = GPT(**MODEL).to(next(iter(weights.values())).dtype)
            model.load_state_dict(weights, strict=True)
            theirs = evaluate(model, val, MODEL["context"], BATCH)
            # Under bf16-mixed the engine validates with copies of 16 bits.
            tolerance = 2e-2 if "--precision=bf16-mixed" in way else 1e-5
            assert abs(ours - theirs) < tolerance, f"{way}: {ours} {theirs}"
            saved, imported, again = (Path(folder) / name for name in ["model.pt", "imported", "again.safetensors"])
            torch.save(dict(state_dict=model.state_dict()), saved)
            key = ["--key=state_dict", f"--heads={MODEL['heads']}"]
            subprocess.run([binary, "checkpoint", "import", f"--from={saved}", f"--to={imported}", *key], **quiet)
            subprocess.run([binary, "checkpoint", "export", f"--from={imported}", f"--to={again}"], **quiet)
            for name, weight in load_file(again).items():
                assert torch.equal(weight, weights[name]) and weight.dtype == weights[name].dtype, name
            print(f"{' '.join(way)}: {ours:.6f}, torch {theirs:.6f}")


if __name__ == "__main__":
    main()
