"""
Writes tests/golden/: what PyTorch makes of a tiny GPT, for the Rust tests to reproduce.

    text.txt            the training text, nonsense prose from the grammar below
    init.safetensors    the weights every case starts from
    small.pt            a smaller GPT's weights as `torch.save` writes them, in three types, beside what a training keeps
    small.safetensors   the same weights
    torch.json          settings, and for every case the loss and gradient norm of each step
    torch_f64.json      the same for some cases in double precision
    final_*.safetensors the weights after the last step of the SGD cases

AdamW's final weights are not kept: where a gradient is zero but for rounding (the bias of k, which
softmax cannot see) Adam's step is rounding noise scaled up to lr, and no two programs agree on it.
"""

import json
import random
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpt import GPT, evaluate, load_text, make_optimizer, num_windows, train_step

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
MODEL = dict(layers=2, heads=2, width=32, context=16)
BATCH, VAL_SPLIT, STEPS = 4, 0.1, 30
OPTIMIZERS = {
    "sgd": dict(lr=0.1, momentum=0.9, weight_decay=0.0),
    "adamw": dict(lr=1e-3, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
}

# (optimizer, clip, accumulate); clip 0 is off. 0.5 turns out to bite in every step, so two cases clip
# at 3, which bites early on and later must leave the gradient as it is.
CASES = [*product(OPTIMIZERS, [0, 0.5], [1, 3]), ("sgd", 3, 1), ("adamw", 3, 3)]

# Of these there are doubles, whose rounding does not count.
DOUBLES = [("sgd", 0, 1), ("sgd", 0.5, 3), ("adamw", 3, 3)]

# 10% of it is 4016 bytes, a multiple of the context: that is 250 windows, not 251, for the last has no
# target for its last byte. And 250 is no multiple of the batch, so the last batch is smaller.
TEXT_BYTES = 40165

# -----------------------------------------------------------------------------
# the text: lower case words are themselves, the rest is rewritten until only words are left

GRAMMAR = {
    "SENTENCE": ["CLAUSE .", "CLAUSE .", "CLAUSE , JOIN CLAUSE .", "WHEN , CLAUSE .", "CLAUSE WHILE CLAUSE ."],
    "CLAUSE": ["THING DID", "THING DID", "THING DID , and then DID", "THING SAW THING", "THING SAW THING WHERE"],
    "THING": ["the NOUN", "the NOUN", "a NOUN", "the ADJ NOUN", "a ADJ NOUN", "the NOUN of the NOUN", "NAME"],
    "DID": ["VERB", "VERB ADV", "VERB WHERE", "VERB ADV WHERE"],
    "SAW": ["carried", "followed", "forgot", "painted", "measured", "buried", "mended", "watched"],
    "WHERE": ["in the NOUN", "under the ADJ NOUN", "near the NOUN", "beyond the NOUN", "beside NAME"],
    "WHEN": ["in the morning", "after the rain", "that winter", "long before the harvest", "at low tide", "once"],
    "WHILE": ["while", "because", "before", "until", "as if"],
    "JOIN": ["and", "but", "so", "yet", "for"],
    "NOUN": ["mountain", "crater", "river", "lantern", "ferryman", "garden", "stone", "bell", "harbour", "kettle",
             "shepherd", "cloud", "ladder", "baker", "furnace", "village", "map", "clock", "door", "fox"],
    "ADJ": ["quiet", "red", "burning", "patient", "hollow", "tall", "forgotten", "dusty", "bright", "crooked"],
    "VERB": ["waited", "sang", "slept", "fell", "turned", "glowed", "walked home", "spoke", "cooled", "trembled"],
    "ADV": ["slowly", "without a word", "twice", "all night", "again", "gently", "for a hundred years"],
    "NAME": ["Marta", "Tobias", "Ilse", "Doctor Venn", "Captain Roux", "Little Hanne"],
}  # fmt: skip


def make_text(size, seed=1234):
    """`size` bytes of paragraphs. Only rng.random() is used: its sequence is the same in every Python."""
    rng = random.Random(seed)
    pick = lambda options: options[int(rng.random() * len(options))]
    expand = lambda s: " ".join(expand(pick(GRAMMAR[w])) if w in GRAMMAR else w for w in s.split())

    def sentence():
        s = expand("SENTENCE").replace(" ,", ",").replace(" .", ".")
        return s[0].upper() + s[1:]

    text = ""
    while len(text) < size:
        text += " ".join(sentence() for _ in range(pick([3, 4, 5, 6]))) + "\n\n"
    return text[: size - 1].encode("ascii") + b"\n"


# -----------------------------------------------------------------------------
# the weights


def make_weights(seed=1234):
    """
    Not how one would start a training, but a start that tells implementations apart. Linears of 0.02
    would leave attention all but uniform, and then a wrong scale, mask or head order costs nothing one
    can measure; at 0.2 it shows. Embeddings stay at 0.02, small enough for LayerNorm's eps to show.
    Nothing is left at exactly 0 or 1.
    """
    torch.manual_seed(seed)
    model = GPT(**MODEL)
    for name, p in model.named_parameters():
        mean = 1.0 if "ln" in name and name.endswith("weight") else 0.0
        std = 0.02 if name in ("tok.weight", "pos.weight") else 0.2
        torch.nn.init.normal_(p, mean, std)
    return model.state_dict()


# -----------------------------------------------------------------------------
# the cases


def run_case(optimizer, clip, accumulate, dtype=torch.float32):
    train, val = load_text(GOLDEN / "text.txt", VAL_SPLIT)
    model = GPT(**MODEL)
    model.load_state_dict(load_file(GOLDEN / "init.safetensors"))
    model.to(dtype)
    opt = make_optimizer(model, optimizer, OPTIMIZERS[optimizer]["lr"])
    name = f"{optimizer}_clip{clip}_acc{accumulate}"
    case = dict(name=name, optimizer=optimizer, **OPTIMIZERS[optimizer], clip=clip, accumulate=accumulate)

    steps = [
        train_step(model, opt, train, MODEL["context"], s * accumulate * BATCH, BATCH, accumulate, clip)
        for s in range(STEPS)
    ]
    case["losses"], case["grad_norms"] = map(list, zip(*steps))
    case["val_loss"] = evaluate(model, val, MODEL["context"], BATCH)
    if optimizer == "sgd" and dtype == torch.float32:
        case["params_file"] = f"final_{name}.safetensors"
        save_file(model.state_dict(), GOLDEN / case["params_file"])

    bites = f", clipped {sum(n > clip for n in case['grad_norms'])} of {STEPS} steps" if clip else ""
    print(f"{name:18} loss {case['losses'][0]:.4f} -> {case['losses'][-1]:.4f}, val {case['val_loss']:.4f}{bites}")
    return case


def save_small():
    """Weights of a GPT of other sizes in the file that training scripts make: a dictionary in a dictionary."""
    torch.manual_seed(7)
    weights = GPT(layers=2, heads=2, width=8, context=4).state_dict()
    for name, dtype in [("tok.weight", torch.bfloat16), ("pos.weight", torch.float64), ("head.weight", torch.float16)]:
        weights[name] = weights[name].to(dtype)
    # Not contiguous, as a tied or a transposed weight is; the file has its strides.
    weights["blocks.0.fc.weight"] = weights["blocks.0.fc.weight"].t().contiguous().t()
    torch.save(dict(epoch=3, state_dict=weights), GOLDEN / "small.pt")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, GOLDEN / "small.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "text.txt").write_bytes(make_text(TEXT_BYTES))
    save_file(make_weights(), GOLDEN / "init.safetensors")
    save_small()
    train, val = load_text(GOLDEN / "text.txt", VAL_SPLIT)
    settings = dict(
        torch=torch.__version__,
        model=MODEL,
        batch=BATCH,
        val_split=VAL_SPLIT,
        steps=STEPS,
        train_windows=num_windows(train, MODEL["context"]),
        val_windows=num_windows(val, MODEL["context"]),
    )
    singles = [run_case(*case) for case in CASES]
    doubles = [run_case(*case, dtype=torch.float64) for case in DOUBLES]
    for file, cases in [("torch.json", singles), ("torch_f64.json", doubles)]:
        (GOLDEN / file).write_text(json.dumps(dict(**settings, cases=cases), indent=1) + "\n")
