"""Gives every matrix of a random model values of its own: distinct.py FOLDER. Runs in the torch environment.

`scripts/random-model` repeats one tile. Tools that keep equal tensors once would make a model of a quarter of the size,
and their speed would be that of the smaller one.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

file = Path(sys.argv[1]) / "model.safetensors"
tensors = load_file(file)
generator = torch.Generator().manual_seed(0)
for name, values in tensors.items():
    if values.dim() == 2:
        tensors[name] = torch.empty(values.shape).normal_(0, 0.02, generator=generator).to(values.dtype)
save_file(tensors, file, {"format": "pt"})
