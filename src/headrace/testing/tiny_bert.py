"""A tiny random BERT with its tokenizer and pooling, and what it computes, written down plainly in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

Float64s = npt.NDArray[np.float64]
WIDTH, HEADS, HIDDEN, LAYERS, POSITIONS = 64, 2, 96, 2, 48
_WORDS = "[PAD] [UNK] [CLS] [SEP] the a sea river is blue deep and runs to old boat of stone"
MASK = "[MASK]"
WORDS = (*_WORDS.split(), MASK)
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def write_tiny_bert(
    folder: Path,
    *,
    pooling: str = "mean",
    prefix: str = "",
    seed: int = 0,
    labels: int = 0,
    has_token_labels: bool = False,
    has_masked_head: bool = False,
) -> None:
    """Writes the model as transformers and sentence-transformers lay it out; its weights depend on ``seed`` alone.

    Args:
        pooling: ``mean`` or ``cls``.
        prefix: before the names of the tensors, e.g. ``bert.``.
        labels: 0, or the classes of a sequence classification.
        has_token_labels: they are those of tokens.
        has_masked_head: tells tokens behind masks; there are no files of sentence-transformers then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {prefix + name: value for name, value in _weights(seed).items()}
    weights |= _classifier(seed, labels) if labels else {}
    weights |= _masked_head(seed) if has_masked_head else {}
    stored = {name: Encoded("F32", value.shape, value.tobytes()) for name, value in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    config = {
        "architectures": [_class(labels, has_token_labels, has_masked_head)],
        **({"id2label": {str(index): f"class {index}" for index in range(labels)}} if labels else {}),
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": HIDDEN,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": MASK}))
    if has_masked_head:
        return
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    mode = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": pooling == "mean"}
    mode["pooling_mode_cls_token"] = pooling == "cls"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))


def _class(labels: int, has_token_labels: bool, has_masked_head: bool) -> str:
    if labels:
        return "BertForTokenClassification" if has_token_labels else "BertForSequenceClassification"
    return "BertForMaskedLM" if has_masked_head else "BertModel"


def _tokenizer() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106  # no password
    tokenizer.add_special_tokens([MASK])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # Many published files say so, and a server must not follow them: a text has its own length.
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6)
    return tokenizer


def _weights(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    def product(name: str, n: int, k: int) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": normal(n, k, scale=k**-0.5), f"{name}.bias": normal(n, scale=0.1)}

    def norm(name: str) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": 1 + normal(WIDTH, scale=0.1), f"{name}.bias": normal(WIDTH, scale=0.1)}

    weights = {
        "embeddings.word_embeddings.weight": normal(len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": normal(POSITIONS, WIDTH, scale=0.3),
        "embeddings.token_type_embeddings.weight": normal(2, WIDTH, scale=0.3),
        **norm("embeddings.LayerNorm"),
    }
    for index in range(LAYERS):
        at = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            weights |= product(f"{at}.attention.self.{part}", WIDTH, WIDTH)
        weights |= product(f"{at}.attention.output.dense", WIDTH, WIDTH) | norm(f"{at}.attention.output.LayerNorm")
        weights |= product(f"{at}.intermediate.dense", HIDDEN, WIDTH) | product(f"{at}.output.dense", WIDTH, HIDDEN)
        weights |= norm(f"{at}.output.LayerNorm")
    return weights | product("pooler.dense", WIDTH, WIDTH)


def _masked_head(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed + 2)
    at = "cls.predictions"
    return {
        f"{at}.transform.dense.weight": (random.standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5).astype(np.float32),
        f"{at}.transform.dense.bias": (random.standard_normal(WIDTH) * 0.1).astype(np.float32),
        f"{at}.transform.LayerNorm.weight": (1 + random.standard_normal(WIDTH) * 0.1).astype(np.float32),
        f"{at}.transform.LayerNorm.bias": (random.standard_normal(WIDTH) * 0.1).astype(np.float32),
        f"{at}.bias": (random.standard_normal(len(WORDS)) * 0.1).astype(np.float32),
    }


def _classifier(seed: int, labels: int) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed + 1)
    return {
        "classifier.weight": (random.standard_normal((labels, WIDTH)) * 0.5).astype(np.float32),
        "classifier.bias": (random.standard_normal(labels) * 0.1).astype(np.float32),
    }


def tiny_bert_scores(ids: Sequence[int], *, labels: int, second_start: int | None = None, seed: int = 0) -> Float64s:
    """Returns the scores of the classes, [labels], before any softmax.

    Args:
        second_start: where token type 1 begins; None for one text.
    """
    w = {name: value.astype(np.float64) for name, value in {**_weights(seed), **_classifier(seed, labels)}.items()}
    first = _rows(ids, seed, len(ids) if second_start is None else second_start)[0]
    pooled = np.tanh(first @ w["pooler.dense.weight"].T + w["pooler.dense.bias"])
    scores: Float64s = pooled @ w["classifier.weight"].T + w["classifier.bias"]
    return scores


def tiny_bert_vector(ids: Sequence[int], *, pooling: str = "mean", seed: int = 0) -> Float64s:
    """Returns the vector of one text, [WIDTH] of length 1."""
    rows = _rows(ids, seed, len(ids))
    row: Float64s = rows[0] if pooling == "cls" else rows.mean(axis=0)
    return np.asarray(row / np.linalg.norm(row))


def _rows(ids: Sequence[int], seed: int, second_start: int) -> Float64s:
    """Returns what the last layer makes of the tokens. Source: Devlin et al., BERT (arXiv 1810.04805)."""
    w = {name: value.astype(np.float64) for name, value in _weights(seed).items()}

    def product(name: str, x: Float64s) -> Float64s:
        y: Float64s = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        return y

    def norm(name: str, x: Float64s) -> Float64s:
        centred = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-12)
        y: Float64s = centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]
        return y

    x = w["embeddings.word_embeddings.weight"][list(ids)] + w["embeddings.position_embeddings.weight"][: len(ids)]
    types = (np.arange(len(ids)) >= second_start).astype(int)
    x = norm("embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][types])
    for index in range(LAYERS):
        at = f"encoder.layer.{index}"
        q, k, v = (
            product(f"{at}.attention.self.{part}", x).reshape(len(ids), HEADS, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(WIDTH / HEADS))
        mixed = (scores / scores.sum(axis=2, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(ids), WIDTH)
        x = norm(f"{at}.attention.output.LayerNorm", x + product(f"{at}.attention.output.dense", mixed))
        inner = product(f"{at}.intermediate.dense", x)
        inner = inner * 0.5 * (1 + _ERF(inner / math.sqrt(2)))
        x = norm(f"{at}.output.LayerNorm", x + product(f"{at}.output.dense", inner))
    return x
