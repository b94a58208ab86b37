"""The demo model as a Hugging Face folder, for judges that read tokenizers or weights themselves.

Its weights are the GGUF's, rounded to bf16; its tokenizer is built from the GGUF's vocabulary and chat template. That
both say what the original says is what the goldens hold (tests/golden), not what the judges find out.
"""

from __future__ import annotations

import json
from pathlib import Path

from judging.environment import FOLDER
from judging.servers import model_path_of


def demo_folder() -> Path:
    """Gives the folder; makes it where it is missing. Cost: the model in bf16, twice, in memory."""
    from headrace.registry.model import open_model
    from headrace.testing.derive import write_bf16_folder
    from headrace.text.gguf_vocab import build_gguf_vocab
    from headrace.text.template import find_templates_in_gguf

    folder = FOLDER / "demo-model"
    done = folder / "tokenizer_config.json"
    if done.is_file():
        return folder
    path = model_path_of("demo")
    (gguf,) = path.glob("*.gguf") if path.is_dir() else [path]
    write_bf16_folder(gguf, folder)
    metadata = open_model(gguf).metadata
    vocabulary = build_gguf_vocab(metadata)
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer.to_str())
    names = {name: text for name, text in vocabulary.special_tokens.items() if name in ("bos_token", "eos_token")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": next(iter(find_templates_in_gguf(metadata).values())),
        **names,
    }
    done.write_text(json.dumps(config))
    return folder
