"""What every format costs, measured on the engines' own outputs: KL and top-1 of decoders, cosines of the encoder.

The reference is Headrace's exact path (fp32), which equals transformers in fp32 on these models (docs/status.md,
"Quality"); for the encoder it is sentence-transformers in fp32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.cells import ENCODER, SMALL
from harness.contender import Contender, Driven
from harness.engines import OURS, Setting, contenders
from harness.http import Served
from harness.processes import CellError
from harness.results import Quality
from harness.rounds import say
from headrace.engine.quality import Distributions, Subject, compare
from headrace.engine.quality_bench import text_windows
from headrace.registry.model import open_model
from headrace.text.prose import shipped_text
from headrace.text.tokenizer import Tokenizer

Judge = Callable[[Quality], None]
REFERENCE = "sentence-transformers fp32"
WINDOW_TOKENS, POSITIONS = 256, 1016
TEXTS, TEXT_TOKENS = 32, 64
WEIGHTS_ONLY = "its weights on our exact path: what its 8-bit activations cost is not in it"


def judge_decoders(setting: Setting, names: Sequence[str], judge: Judge) -> None:
    """Measures every decoder format on the small model; the random one says nothing about quality.

    Args:
        names: parts of "engine format" that are wanted; none means all.
        judge: gets each finding as soon as it is there.
    """
    source = setting.models / f"{SMALL}.Q4_1.gguf"
    windows = text_windows(open_model(source), shipped_text(), WINDOW_TOKENS, POSITIONS)
    exact = Subject(source, dtype="fp32", threads=setting.threads, sequences=1).distributions(windows)

    def note(engine: str, form: str, candidate: Distributions, what: str) -> None:
        found = compare(exact, candidate)
        say(f"{engine} {form}: KL {found.kl_mean:.2e}, top-1 {found.top1_ratio:.2%}")
        judge(Quality(SMALL, engine, form, found.positions, found.kl_mean, found.top1_ratio, what=what))

    for form in wanted(OURS, ("Q4_1", "Q8_0"), names):
        path = setting.models / f"{SMALL}.{form}.gguf"
        note(OURS, form, Subject(path, threads=setting.threads, sequences=1).distributions(windows), "")
    for form in wanted("llama.cpp", ("Q4_0", "Q4_1", "Q8_0"), names):
        path = setting.models / f"{SMALL}.{form}.gguf"
        subject = Subject(path, dtype="fp32", threads=setting.threads, sequences=1)
        note("llama.cpp", form, subject.distributions(windows), WEIGHTS_ONLY)
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place) / "windows.json", Path(place) / "scores.npz"
        given.write_text(json.dumps(windows))
        for peer in contenders(setting, SMALL)[0]:
            if isinstance(peer, Driven) and wanted(peer.engine, (peer.format,), names):
                try:
                    peer.start()
                    peer.answer("score", windows=str(given), out=str(out))
                    scores = np.load(out)
                    note(peer.engine, peer.format, Distributions(scores["ids"], scores["logprobs"]), "")
                except CellError as error:
                    say(f"{peer.engine} {peer.format}: {error}")
                finally:
                    peer.end()


def wanted(engine: str, forms: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the formats that any of the names is a part of, with the engine before it."""
    return [form for form in forms if not names or any(name.lower() in f"{engine} {form}".lower() for name in names)]


def judge_encoders(setting: Setting, names: Sequence[str], judge: Judge) -> None:
    """Measures every encoder format on windows of the shipped text, beside the reference, which always runs."""
    found, _ = contenders(setting, ENCODER)
    ids = _text_ids(setting)
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place) / "ids.npy", Path(place) / "vectors.npy"
        np.save(given, ids)
        vectors: dict[str, NDArray[np.float32]] = {}
        for each in found:
            if each.engine == OURS and isinstance(each, Driven):
                continue  # the same engine answers over HTTP
            if not wanted(each.engine, (each.format,), [*names, REFERENCE] if names else []):
                continue
            try:
                each.start()
                vectors[f"{each.engine} {each.format}"] = _vectors(each, ids, given, out)
            except CellError as error:
                say(f"{each.engine} {each.format}: {error}")
            finally:
                each.end()
    reference = vectors[REFERENCE]
    for name, values in vectors.items():
        engine, form = name.rsplit(" ", 1)
        cosines = (values * reference).sum(axis=1)
        low, mean = float(cosines.min()), float(cosines.mean())
        say(f"{engine} {form}: cosine at least {low:.6f}, mean {mean:.6f}")
        judge(Quality(ENCODER, engine, form, len(ids), cosine_min=low, cosine_mean=mean))


def _vectors(contender: Contender, ids: NDArray[np.int64], given: Path, out: Path) -> NDArray[np.float32]:
    if isinstance(contender, Served):
        answers = contender.answer("vectors", ids=ids.tolist())["vectors"]
        found = np.stack([np.frombuffer(item, dtype=np.float32) for item in answers])
    else:
        contender.answer("vectors", ids=str(given), out=str(out))
        found = np.load(out)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def _text_ids(setting: Setting) -> NDArray[np.int64]:
    """Returns windows of the text as token ids, each between the model's opening and closing token, [TEXTS, T]."""
    tokenizer = Tokenizer.from_files(open_model(setting.models / ENCODER).tokenizer_files)
    whole = tokenizer.encode(shipped_text(), add_special=True)
    body, inner = whole[1:-1], TEXT_TOKENS - 2
    rows = [[whole[0], *body[i * inner : (i + 1) * inner], whole[-1]] for i in range(TEXTS)]
    return np.array(rows, dtype=np.int64)
