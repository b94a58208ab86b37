"""The real ALBERT of rxnmapper (MIT), which reads chemical reactions, laid out as transformers would save it.

Its wheel has a pickle and a vocabulary without a tokenizer file. ``write_rxnmapper`` makes of them what a user makes
once where they trust the file: ``save_pretrained`` for the weights, and the regular expression of the package's own
tokenizer as a ``tokenizer.json``.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

from .pickled import read_state_dict

_INSIDE = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
# What one token of a reaction is, in the words of rxnmapper/smiles_utils.py.
_PATTERN = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"


def write_rxnmapper(wheel: Path, folder: Path) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json; returns ``folder``."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in ("config.json", "pytorch_model.bin", "vocab.txt"):
            (folder / name).write_bytes(archive.read(f"{_INSIDE}/{name}"))
    state = read_state_dict(folder / "pytorch_model.bin")
    stored = {name: Encoded("F32", value.shape, value.tobytes()) for name, value in state.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored, {"format": "pt"}))
    (folder / "pytorch_model.bin").unlink()
    vocab = {line: index for index, line in enumerate((folder / "vocab.txt").read_text().splitlines())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))  # no password
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PATTERN), "removed", invert=True)
    ends = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
