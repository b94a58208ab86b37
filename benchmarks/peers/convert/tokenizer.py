"""Writes a GGUF's tokenizer as files that the peers' tools read: tokenizer.py GGUF FOLDER.."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

gguf, folder = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
