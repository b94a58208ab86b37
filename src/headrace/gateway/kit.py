"""The text kit of a model on disk: its tokenizer and chat template, loaded once per front."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from headrace.registry.model import open_model
from headrace.text.detokenize import Detokenizer
from headrace.text.stop import StopMatcher
from headrace.text.template import ChatTemplate, find_templates_in_files, find_templates_in_gguf
from headrace.text.tokenizer import Tokenizer


class ModelText:
    """Everything that turns text into tokens and back for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def text_stream(self, *, is_text_start: bool) -> Detokenizer:
        """Makes an incremental detokeniser; special tokens are left out."""
        return Detokenizer(self.tokenizer, is_text_start=is_text_start)

    def stops(self, stops: Sequence[str]) -> StopMatcher:
        """Makes a matcher of stop strings."""
        return StopMatcher(stops)

    def close(self) -> None:
        """Ends the template's process."""
        self.template.close()


def load_kit(path: Path) -> ModelText:
    """Loads the text side of the model at ``path``; no weight is read.

    Raises:
        ModelError: the files are malformed, or not supported.
        MachineError: the template's process cannot be started.
    """
    files = open_model(path)
    if files.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(files.metadata)
        sources = find_templates_in_gguf(files.metadata)
    else:
        tokenizer = Tokenizer.from_files(files.tokenizer_files)
        sources = find_templates_in_files(files.tokenizer_files)
    # Templates write the date as people near the machine see it.
    template = ChatTemplate(sources, special_tokens=tokenizer.special_tokens, now=lambda: datetime.now().astimezone())
    return ModelText(tokenizer, template)
