"""The text kit of a model on disk: its tokenizer and chat template, loaded once per front."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from headrace.registry.model import open_model
from headrace.text.detokenize import Detokenizer
from headrace.text.message import Dialect
from headrace.text.stop import StopMatcher
from headrace.text.template import ChatTemplate, find_templates_in_files, find_templates_in_gguf
from headrace.text.tokenizer import Tokenizer


class ModelText:
    """Everything that turns text into tokens and back for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, dialect: Dialect) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.dialect = dialect
        kept = [*dialect.form.kept_tokens, *(dialect.marks.tokens if dialect.marks else ())]
        self._message_ids = frozenset(index for token in kept if (index := tokenizer.token_id(token)) is not None)

    def text_stream(self, *, is_text_start: bool, skip_special: bool = True, is_message: bool = False) -> Detokenizer:
        """Makes an incremental detokeniser; of special tokens a message keeps those that mark calls and thoughts."""
        kept_ids = self._message_ids if is_message else frozenset[int]()
        return Detokenizer(self.tokenizer, skip_special=skip_special, is_text_start=is_text_start, kept_ids=kept_ids)

    @property
    def special_tokens(self) -> dict[str, str]:
        """``bos_token`` … to their text."""
        return self.tokenizer.special_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.template.is_present

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
    is_gguf = files.kind == "gguf"
    sources = find_templates_in_gguf(files.metadata) if is_gguf else find_templates_in_files(files.tokenizer_files)
    with ThreadPoolExecutor(1) as pool, ExitStack() as unless_good:
        # The template's process starts while the vocabulary is built. Templates write the date as people near the
        # machine see it.
        opening = pool.submit(ChatTemplate, sources, now=lambda: datetime.now().astimezone())
        unless_good.callback(_close, opening)
        tokenizer = Tokenizer.from_gguf(files.metadata) if is_gguf else Tokenizer.from_files(files.tokenizer_files)
        template = opening.result()
        unless_good.pop_all()
    template.use(tokenizer.special_tokens)
    return ModelText(tokenizer, template, Dialect.of(list(sources.values())))


def _close(opening: Future[ChatTemplate]) -> None:
    if opening.exception() is None:
        opening.result().close()
