"""A server whose models each say one thing: what a big model wrote, recorded in a parser test of another server.

The front is the real one, with the real chat templates of those models; behind it stands a mock worker for each
recording. ``python recorded_server.py FOLDER TEMPLATES`` makes the models in FOLDER, prints one line of JSON (its URL
and the recordings, each with the name that requests use) and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from headrace.gateway.kit import ModelText, load_kit
from headrace.protocol.launch import FrontLaunch, ModelLaunch
from headrace.replica.port import Readiness
from headrace.server.front import Front
from headrace.testing.mock_worker import MockWorker, Reply, Script
from headrace.testing.recordings import Recording, recordings
from headrace.testing.tiny import write_tiny_llama
from headrace.text.message import Dialect

CONTEXT_TOKENS = 65_536
VOCAB_SIZE = 384
READY_S = 60.0
# A template of each form, of llama.cpp's tree; it has none of FunctionGemma, whose recordings the tests play.
TEMPLATES = {
    "hermes": "Qwen-Qwen3-0.6B.jinja",
    "llama3": "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "mistral": "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    "gemma4": "google-gemma-4-31B-it.jinja",
    "generic": "microsoft-Phi-3.5-mini-instruct.jinja",
}
# What aider asks a model for: a whole file. As in tests/basic/test_wholefile.py of aider 0.86 (Apache-2.0).
WHOLE_FILE = "Here is the new file:\n\nhello.py\n```\nprint('goodbye')\n```\n"


def make_model(folder: Path, template: str) -> Path:
    """Writes a tiny model with a chat template; marks of calls and thoughts are special tokens, as in the big ones."""
    write_tiny_llama(folder, vocab_size=VOCAB_SIZE, context_tokens=CONTEXT_TOKENS)
    dialect = Dialect.of([template])
    marks = [*dialect.form.kept_tokens, *(dialect.marks.tokens if dialect.marks else ())]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    reserved = [token for token in tokenizer["added_tokens"] if token["content"].startswith("<|reserved_")]
    for token, mark in zip(reserved, dict.fromkeys(marks), strict=False):
        tokenizer["model"]["vocab"][mark] = tokenizer["model"]["vocab"].pop(token["content"])
        token["content"] = mark
    file.write_text(json.dumps(tokenizer))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return folder


def encoder_of(kit: ModelText) -> Callable[[str], list[int]]:
    """Gives what turns a recording into the ids that the big model would have sampled."""
    return lambda text: list(kit.tokenizer.encode(text, add_special=False))


def played() -> Iterator[tuple[str, Recording]]:
    """Gives each recording that is played and the name that requests use."""
    for index, recording in enumerate(recordings()):
        if recording.form in TEMPLATES:
            yield f"{recording.form}-{index}", recording
    yield "generic-aider", Recording("generic", "aider tests/basic/test_wholefile.py", WHOLE_FILE, WHOLE_FILE, [], "")


async def serve(folder: Path, templates: Path) -> None:
    """Serves until the input ends."""
    async with AsyncExitStack() as stack:
        kits: dict[str, tuple[Path, ModelText]] = {}
        for form, file in TEMPLATES.items():
            path = make_model(folder / form, (templates / file).read_text())
            kit = load_kit(path)
            stack.callback(kit.close)
            kits[form] = (path, kit)
        models, chosen, said = [], [], []
        for name, recording in played():
            path, kit = kits[recording.form]
            link = folder / f"{name}.sock"
            script = Script(default=Reply(text=recording.written), context_tokens=CONTEXT_TOKENS)
            worker = await stack.enter_async_context(MockWorker(script, encode=encoder_of(kit)))
            await worker.start(link)
            models.append(ModelLaunch(str(path), [name], str(link)))
            chosen.append(kit)
            said.append({"model": name, **msgspec.to_builtins(recording), "tools": recording.tools})
        listener = socket.create_server(("127.0.0.1", 0))
        front = Front(FrontLaunch(models, []), chosen, [listener])
        await stack.enter_async_context(front.running())
        async with asyncio.timeout(READY_S):
            replicas = [front.models.named(one["model"]).replica for one in said]
            while any(replica.readiness is not Readiness.READY for replica in replicas):  # noqa: ASYNC110  # has no event
                await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        print(json.dumps({"url": url, "recordings": said}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
