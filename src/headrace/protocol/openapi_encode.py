"""The pieces of ``/openapi.json`` for the routes that do not generate: vectors, scores and classes."""

from __future__ import annotations

from typing import Final

from headrace.protocol.binary import ENDIANNESS, EmbedDtype, VectorForm
from headrace.protocol.embeddings import MAX_DIMENSIONS
from headrace.protocol.inputs import MAX_INPUTS
from headrace.protocol.invoked import BY_FIELD, INPUT
from headrace.protocol.openai import MAX_TOKEN_ID
from headrace.protocol.openapi_parts import Schema, choice, cut_to, flag, integer, text_of
from headrace.protocol.pooling import PoolingTask
from headrace.protocol.tasks import FUNCTIONS, MAX_MASKED_TOP, STRATEGIES
from headrace.protocol.tei import DIRECTIONS

_MODEL: Final = {"model": text_of(256, "A name of `GET /v1/models`; may be left out.")}
_TEXT: Final[Schema] = {"type": "string"}
_FILLED: Final[Schema] = {"type": "string", "minLength": 1}
_TRUNCATE: Final = {
    "truncate_prompt_tokens": cut_to(
        MAX_TOKEN_ID, "Cut longer inputs to so many tokens, −1: to the context; without, they are refused."
    )
}
_RAW: Final = {"use_activation": flag("False: scores as the model gives them (vLLM's).")}
_CUT: Final = {
    "truncate": flag("Cut longer inputs to the context (TEI's)."),
    "truncation_direction": choice(DIRECTIONS, "`Right`: the end is cut (TEI's)."),
}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_DOCUMENT: Final[Schema] = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_MANY: Final = {**_list({"anyOf": [_TEXT, _DOCUMENT]}), "minItems": 1, "maxItems": MAX_INPUTS}


def _texts(text: str) -> Schema:
    """A text or a list of texts, each a string or an object with ``text``."""
    return {"anyOf": [_TEXT, _MANY], "description": text}


def _some_texts(text: str) -> Schema:
    """The same, or null for absent."""
    return {"anyOf": [{"type": "null"}, _TEXT, _MANY], "description": text}


_DOCUMENTS: Final[Schema] = {
    **_MANY,
    "type": ["array", "null"],
    "description": "The texts to score, each a string or an object with `text`.",
}
_ROW: Final = _list({"anyOf": [_TEXT, {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}]})
_PART: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_AS_OBJECT: Final[Schema] = {
    "type": "object",
    "properties": {
        # Joined the parts must not be empty.
        "content": {**_list(_PART), "contains": {"type": "object", "properties": {"text": {"minLength": 1}}}},
        "prompt_string": _FILLED,
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
_MANY_INPUTS: Final[Schema] = {
    **_list({"anyOf": [_FILLED, {**_ROW, "minItems": 1}, _AS_OBJECT]}),
    "minItems": 1,
    "maxItems": MAX_INPUTS,
}
_INPUT: Final[Schema] = {
    # A list without a single id is a batch.
    "anyOf": [_FILLED, {**_ROW, "contains": {"type": "integer"}}, _AS_OBJECT, _MANY_INPUTS],
    "description": "A text, token ids, or a list of such; ids may have texts among them, which then get no special "
    "tokens; a text may be an object with `content` or `prompt_string` (llama.cpp's).",
}

EMBEDDINGS: Final[dict[str, Schema]] = {
    **_MODEL,
    "input": _INPUT,
    "encoding_format": choice(
        VectorForm, "`float`, `base64`, or vLLM's `bytes` (their places in the header `metadata`) and `bytes_only`."
    ),
    "padding": {"enum": [None, False, "do_not_pad"], "description": "Inputs are never padded."},
    "embed_dtype": choice(
        EmbedDtype,
        "What bytes are of: `float32` (the default), `float16`, `bfloat16`, `fp8_e4m3`, `fp8_e5m2` (vLLM's).",
    ),
    "endianness": choice(ENDIANNESS, "And in which order of bytes: `native` (little), `little` or `big`."),
    "dimensions": integer(1, MAX_DIMENSIONS, "Leading elements of the vectors, brought to length 1 again."),
    "user": text_of(2**26, "Not used."),
    **_TRUNCATE,
}
RERANK: Final[dict[str, Schema]] = {
    **_MODEL,
    "query": {"type": "string", "description": "What the documents are scored against."},
    "documents": _DOCUMENTS,
    "texts": {**_DOCUMENTS, "description": "The same, in TEI's form: the answer is then a bare list."},
    "top_n": integer(1, MAX_INPUTS, "Documents to give back; all by default."),
    "return_documents": flag("Repeat the documents in the answer."),
    "return_text": flag("The same, in TEI's form."),
    "raw_scores": flag("Scores as the model gives them, without the sigmoid."),
    "max_tokens_per_doc": integer(1, MAX_TOKEN_ID, "Cut documents that do not fit (Cohere's)."),
    "truncate": _CUT["truncate"],
    **_RAW,
    **_TRUNCATE,
}
SCORE: Final[dict[str, Schema]] = {
    **_MODEL,
    "text_1": _some_texts("One text for all, or as many as there are texts to score."),
    "text_2": _some_texts("The texts to score."),
    "queries": _some_texts("`text_1` under another name."),
    "documents": _some_texts("`text_2` under another name."),
    "data_1": _some_texts("`text_1` under another name."),
    "data_2": _some_texts("`text_2` under another name."),
    "items": _some_texts("`text_2` under another name."),
    **_RAW,
    **_TRUNCATE,
}
CLASSIFY: Final[dict[str, Schema]] = {**_MODEL, "input": _texts("The texts to classify."), **_RAW, **_TRUNCATE}
POOLING: Final[dict[str, Schema]] = {
    **EMBEDDINGS,
    "task": choice(
        PoolingTask,
        "`token_embed` (the default of a model that makes vectors), `embed`, `classify` or `token_classify`.",
    ),
    "use_activation": flag("False: scores as the model gives them, and tokens' vectors of whatever length."),
    "normalize": flag("The same for vectors."),
}
EMBED: Final[dict[str, Schema]] = {
    "inputs": _texts("A text or a list of texts."),
    "normalize": {"enum": [True, None], "description": "Vectors are of length 1."},
    "dimensions": EMBEDDINGS["dimensions"],
    **_CUT,
}
PREDICT: Final[dict[str, Schema]] = {
    "inputs": _texts("A text or a list of texts."),
    "raw_scores": RERANK["raw_scores"],
    **_CUT,
}
EMBED_ALL: Final[dict[str, Schema]] = {"inputs": EMBED["inputs"], **_CUT}
SIMILARITY: Final[dict[str, Schema]] = {
    "inputs": {
        "type": "object",
        "properties": {"source_sentence": _FILLED, "sentences": _texts("What it is compared with.")},
        "required": ["source_sentence", "sentences"],
        "description": "A text, and those that it is compared with.",
    },
    "parameters": {"type": ["object", "null"], "properties": _CUT, "description": "`truncate` (TEI's)."},
}

TASK: Final[dict[str, Schema]] = {
    "inputs": {
        "anyOf": [_TEXT, _list(_TEXT), {"type": "object"}],
        "description": "A text or a list of texts; a model that makes vectors takes `/similarity`'s form too.",
    },
    "parameters": {
        "type": ["object", "null"],
        "properties": {
            "truncate": _CUT["truncate"],
            "truncation_direction": _CUT["truncation_direction"],
            "top_k": integer(1, MAX_MASKED_TOP, "Classes of each text, or tokens of each mask."),
            "aggregation_strategy": choice(STRATEGIES, "`simple`: neighbours of one class are one entity; or `none`."),
            "ignore_labels": {"type": ["array", "null"], "items": _TEXT, "description": "Classes to leave out."},
            "function_to_apply": choice(
                FUNCTIONS, "`none`: scores as the model gives them; `sigmoid` or `softmax`: these of them."
            ),
        },
        "description": "Those of Hugging Face's inference API; they may stand beside `inputs` as well.",
    },
    "query": {"type": ["string", "null"], "description": "For a model that ranks, with `texts`, as at `/rerank`."},
    "texts": RERANK["texts"],
}

INVOKED: Final[dict[str, Schema]] = {
    **{name: {"description": f"As at `{path}`."} for name, path in BY_FIELD.items()},
    INPUT: {"description": "As at `/v1/embeddings` or `/v1/classify`: what the model is for."},
}

_NUMBER: Final[Schema] = {"type": "number"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_USAGE: Final[Schema] = {
    "type": "object",
    "properties": {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
    "required": ["prompt_tokens", "total_tokens"],
}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


_CLASS: Final = _object(score=_NUMBER, label=_TEXT)
_RESULT: Final[Schema] = {
    "type": "object",
    "properties": {"index": _COUNT, "relevance_score": _NUMBER, "document": _object(text=_TEXT)},
    "required": ["index", "relevance_score"],
}
_TEI_RESULT: Final[Schema] = {
    "type": "object",
    "properties": {"index": _COUNT, "score": _NUMBER, "text": _TEXT},
    "required": ["index", "score"],
}
ENCODE_ANSWERS: Final[dict[str, Schema]] = {
    "Embeddings": _object(
        id=_TEXT,
        created=_COUNT,
        object={"const": "list"},
        data=_list(_object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [_TEXT, _list(_NUMBER)]})),
        model=_TEXT,
        usage=_USAGE,
    ),
    "Ranking": {
        "anyOf": [
            _object(id=_TEXT, model=_TEXT, results=_list(_RESULT), meta={"type": "object"}, usage=_USAGE),
            _list(_TEI_RESULT),
        ]
    },
    "Scores": _object(
        id=_TEXT,
        object={"const": "list"},
        model=_TEXT,
        data=_list(_object(index=_COUNT, object={"const": "score"}, score=_NUMBER)),
        usage=_USAGE,
    ),
    "Classes": _object(
        id=_TEXT,
        object={"const": "list"},
        model=_TEXT,
        data=_list(_object(index=_COUNT, label=_TEXT, probs=_list(_NUMBER), num_classes=_COUNT)),
        usage=_USAGE,
    ),
    "Pooled": _object(
        id=_TEXT,
        object={"const": "list"},
        created=_COUNT,
        model=_TEXT,
        data=_list(
            _object(
                index=_COUNT,
                object={"const": "pooling"},
                data={"anyOf": [_TEXT, _list(_NUMBER), _list(_list(_NUMBER))]},
                shape=_list(_COUNT),
            )
        ),
        usage=_USAGE,
    ),
    "TokenVectors": _list(_list(_list(_NUMBER))),
    "Similarities": _list(_NUMBER),
    "Vectors": _list(_list(_NUMBER)),
    "TaskAnswer": {
        "anyOf": [
            {"type": "array"},
            _object(id=_TEXT, model=_TEXT, results=_list(_RESULT), meta={"type": "object"}, usage=_USAGE),
        ],
        "description": "Vectors, cosines, classes, entities, suggestions for masks or a ranking.",
    },
    "Predictions": {"anyOf": [_list(_CLASS), _list(_list(_CLASS))]},
    "EncoderInfo": _object(
        model_id=_TEXT,
        model_type={"type": "object"},
        max_input_length=_COUNT,
        max_client_batch_size=_COUNT,
        version=_TEXT,
    ),
}
