"""Writes a GGUF's tokenizer as files that the peers' tools read: tokenizer.py GGUF FOLDER.."""

import sys
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

gguf, folder = Path(sys.argv[1]), sys.argv[2]
read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
# The class that was guessed for the file would be written with it, and do its own things to texts when it is read again
# (CodeLlama's splits words from their spaces). This one does what tokenizer.json says, and nothing else.
whole = PreTrainedTokenizerFast(
    tokenizer_object=read.backend_tokenizer,
    bos_token=read.bos_token,
    eos_token=read.eos_token,
    unk_token=read.unk_token,
    chat_template=read.chat_template,
)
whole.save_pretrained(folder)
text = "The river ran 1,234 miles below the old mill. "
again = AutoTokenizer.from_pretrained(folder)
if again(text, add_special_tokens=False).input_ids != read.backend_tokenizer.encode(text, add_special_tokens=False).ids:
    sys.exit(f"{folder}: the tokenizer that was written reads a text otherwise than the one of {gguf}")
