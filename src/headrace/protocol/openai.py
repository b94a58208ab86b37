"""OpenAI's request types for chat and text completions, and the strict reading of them.

Data flow: body bytes → ``strict_json`` → ``parse_chat`` or ``parse_completion`` → a frozen request that the gateway
runs. Ranges are those of api.md; what depends on the model (context, vocabulary) is checked by the gateway. A known
field that we do not support and that would change the answer is refused by name; unknown ones are listed in
``ignored_fields``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from headrace.base.errors import PermissionDenied, RequestError
from headrace.protocol import unsupported
from headrace.protocol.fields import Fields, as_integer
from headrace.protocol.messages import parse_messages
from headrace.protocol.strict_json import decode_object, shown
from headrace.protocol.structured import Wish, take_wish
from headrace.protocol.tool_use import ToolUse, take_tool_use

MAX_N: Final = 8
MAX_TOP_LOGPROBS: Final = 20
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_BAD_WORDS: Final = 64
MAX_BAD_WORD_CHARS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 2**16
MAX_SEQUENCES: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
# Token ids in one list to be read.
MAX_IDS: Final = 2**20
# What fits a 32-bit counter; the model's context is the real limit.
MAX_MAX_TOKENS: Final = 2**31 - 1
# A field that is a variable of chat templates.
REASONING_EFFORT: Final = "reasoning_effort"
_MODEL_CHARS: Final = 256

# Names that steer a server from inside; no client may set them.
_FORBIDDEN: Final = frozenset({"api_base", "base_url", "chat_template", "trust_remote_code"})
RESERVED_TEMPLATE_NAMES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "bos_token", "eos_token"}
)


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate: what chat and text completions share.

    Args:
        model: empty where the client left it out: it takes what is served.
        max_tokens: None takes the endpoint's default.
        num_logprobs: None, or how many alternatives to report beside each chosen token.
        prompt_logprobs: the same for each token of the prompt.
        truncate_prompt_tokens: None, or how many of the prompt's last tokens are wanted; 0 for what the context holds.
        is_cut_at_end: then they are its first tokens.
        bad_words: texts that the answer may not be made of, as the model's tokenizer writes them.
        has_token_ids: the ids of prompt and answer are wanted.
        shows_ids: log-probabilities name tokens by id (``token_id:5``).
        best_of: sequences to make for each prompt, ≥ n; the n likeliest are answered.
        wish: None, or what the answer must look like.
        seed: None draws one.
    """

    model: str
    is_stream: bool
    has_usage: bool
    has_continuous_usage: bool
    max_tokens: int | None
    min_tokens: int
    n: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    num_logprobs: int | None
    priority: int
    cache_salt: str
    add_special_tokens: bool
    skip_special_tokens: bool
    has_stop_in_output: bool
    allowed_token_ids: tuple[int, ...]
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    is_cut_at_end: bool
    bad_words: tuple[str, ...]
    has_token_ids: bool
    shows_ids: bool
    best_of: int
    wish: Wish | None
    ignored_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One ``/v1/chat/completions`` request; messages are normalised for chat templates.

    Args:
        has_thoughts: what the model thought is shown; it is parted from the answer in any case.
    """

    options: Options
    messages: list[dict[str, object]]
    tools: ToolUse | None
    echo: bool
    add_generation_prompt: bool
    continue_final_message: bool
    has_thoughts: bool
    template_values: dict[str, str | int | float | bool]
    kind: Literal["chat"] = "chat"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One ``/v1/completions`` request; each prompt is text or token ids."""

    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool
    kind: Literal["completion"] = "completion"


GenerateRequest = ChatRequest | CompletionRequest


def parse_chat(body: bytes) -> ChatRequest:
    """Reads a chat request.

    Raises:
        RequestError: naming the field, what it was and what is allowed.
    """
    return chat_from_values(decode_object(body))


def chat_from_values(values: dict[str, object], ignored: tuple[str, ...] = ()) -> ChatRequest:
    """Reads a chat request whose body is decoded.

    Args:
        ignored: fields that another reader has met and did not know.

    Raises:
        RequestError: as for ``parse_chat``.
    """
    fields = Fields(values)
    messages = parse_messages(fields)
    tools = take_tool_use(fields)
    has_logprobs = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top is not None and not has_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    echo = fields.flag("echo")
    modalities = fields.take("modalities")
    if modalities is not None and modalities != ["text"]:
        raise unsupported.unsupported("modalities")
    continue_final_message = fields.flag("continue_final_message")
    add_generation_prompt = fields.flag("add_generation_prompt", default=not continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both set: choose one", param="continue_final_message"
        )
    has_thoughts = fields.flag("include_reasoning", default=True)
    template_values = _take_template_values(fields)
    max_completion_tokens = fields.integer("max_completion_tokens", 1, MAX_MAX_TOKENS)
    options = _take_options(
        fields,
        num_logprobs=(num_top or 0) if has_logprobs else None,
        max_completion_tokens=max_completion_tokens,
        low_max_tokens=1,
        add_special_tokens=False,
        best_of=None,
        ignored=ignored,
    )
    return ChatRequest(
        options, messages, tools, echo, add_generation_prompt, continue_final_message, has_thoughts, template_values
    )


def parse_completion(body: bytes) -> CompletionRequest:
    """Reads a text completion request.

    Raises:
        RequestError: naming the field, what it was and what is allowed.
    """
    fields = Fields(decode_object(body))
    prompts = _take_prompts(fields)
    echo = fields.flag("echo")
    num_logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    best_of = fields.integer("best_of", 1, MAX_N)
    options = _take_options(
        fields,
        num_logprobs=num_logprobs,
        max_completion_tokens=None,
        low_max_tokens=0,
        add_special_tokens=True,
        best_of=best_of,
    )
    # 0 asks for the prompt and its log-probabilities alone, as loglikelihood harnesses do.
    if options.max_tokens == 0 and not echo and options.prompt_logprobs is None:
        raise RequestError(
            "max_tokens must be at least 1, got 0, which is for echo or prompt_logprobs: the prompt alone",
            param="max_tokens",
        )
    if len(prompts) * options.best_of > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts times n {options.best_of} is over the limit of {MAX_SEQUENCES}: send fewer",
            param="prompt",
        )
    return CompletionRequest(options, prompts, echo)


def _take_options(
    fields: Fields,
    *,
    num_logprobs: int | None,
    max_completion_tokens: int | None,
    low_max_tokens: int,
    add_special_tokens: bool,
    best_of: int | None,
    ignored: tuple[str, ...] = (),
) -> Options:
    model = fields.text("model", _MODEL_CHARS)
    if model == "":
        raise fields.wrong("model", model, "a name of GET /v1/models, or left out")
    _refuse_forbidden(fields)
    unsupported.refuse(fields, unsupported.GENERATE)
    fields.text("user", 1024)
    max_tokens = fields.integer("max_tokens", low_max_tokens, MAX_MAX_TOKENS)
    if max_completion_tokens is not None:
        max_tokens = max_completion_tokens if max_tokens is None else min(max_tokens, max_completion_tokens)
    min_tokens = fields.integer("min_tokens", 0, MAX_MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens {min_tokens} is over max_tokens {max_tokens}", param="min_tokens")
    is_stream = fields.flag("stream")
    has_usage, has_continuous_usage, ignored_stream = _take_stream_options(fields, is_stream=is_stream)
    top_k = fields.integer("top_k", -1, 2**31 - 1) or 0
    is_special = fields.flag("add_special_tokens", default=add_special_tokens)
    n = fields.integer("n", 1, MAX_N) or 1
    if best_of is not None and best_of < n:
        raise RequestError(f"best_of {best_of} is less than n {n}", param="best_of")
    if best_of is not None and best_of > n and is_stream:
        raise RequestError("best_of over n cannot be streamed: it is known only at the end", param="best_of")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None and is_stream:
        raise RequestError("prompt_logprobs cannot be streamed: set stream to false", param="prompt_logprobs")
    truncate = fields.integer("truncate_prompt_tokens", -1, MAX_MAX_TOKENS)
    if truncate == 0:
        raise RequestError("truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens")
    allowed_token_ids = _take_token_ids(fields, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
    wish = take_wish(fields)
    if wish is not None and allowed_token_ids:
        raise RequestError(f"allowed_token_ids and {wish.param} cannot be combined", param="allowed_token_ids")
    return Options(
        model=model or "",
        is_stream=is_stream,
        has_usage=has_usage,
        has_continuous_usage=has_continuous_usage,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stops=_take_stops(fields),
        stop_token_ids=_take_token_ids(fields, "stop_token_ids", MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.flag("ignore_eos"),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_k=max(top_k, 0),  # -1 is the wire's other way to say "all"
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, is_low_open=True),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 10.0, is_low_open=True),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        logit_bias=_take_logit_bias(fields),
        num_logprobs=num_logprobs,
        priority=_take_priority(fields),
        cache_salt=fields.text("cache_salt", 256) or "",
        add_special_tokens=is_special,
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        has_stop_in_output=fields.flag("include_stop_str_in_output"),
        allowed_token_ids=allowed_token_ids,
        prompt_logprobs=prompt_logprobs,
        truncate_prompt_tokens=None if truncate is None else max(truncate, 0),
        is_cut_at_end=_take_side(fields),
        bad_words=_take_bad_words(fields),
        has_token_ids=fields.flag("return_token_ids"),
        shows_ids=fields.flag("return_tokens_as_token_ids"),
        best_of=best_of or n,
        wish=wish,
        ignored_fields=ignored + fields.unknown() + ignored_stream,
    )


def _take_stream_options(fields: Fields, *, is_stream: bool) -> tuple[bool, bool, tuple[str, ...]]:
    values = fields.mapping("stream_options")
    if values is None:
        return False, False, ()
    inner = Fields(values, "stream_options.")
    has_usage = inner.flag("include_usage")
    has_continuous_usage = inner.flag("continuous_usage_stats")
    if not is_stream:
        if has_usage or has_continuous_usage:
            raise RequestError(
                "stream_options needs stream: true; other answers have their usage", param="stream_options"
            )
        return False, False, ("stream_options",)
    return has_usage, has_usage and has_continuous_usage, inner.unknown()


def _take_stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.wrong("stop", value, "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} entries, the limit is {MAX_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise fields.wrong("stop", stop, "a string or a list of strings, none of them empty")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string has {len(stop)} characters, the limit is {MAX_STOP_CHARS}", param="stop")
    return tuple(dict.fromkeys(stops))


def _take_bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.items("bad_words", MAX_BAD_WORDS) or []
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise fields.wrong(
                "bad_words", word, f"a list of texts of 1 to {MAX_BAD_WORD_CHARS} characters, none blank"
            )
    return tuple(dict.fromkeys(str(word) for word in words))


def _take_side(fields: Fields) -> bool:
    rule = '"left" (the end is kept) or "right" (the beginning is kept)'
    return fields.choice("truncation_side", ("left", "right"), rule) == "right"


def _take_token_ids(fields: Fields, name: str, max_items: int) -> tuple[int, ...]:
    items = fields.items(name, max_items)
    return () if items is None else tuple(_token_ids(name, items))


def _token_ids(name: str, items: list[object]) -> list[int]:
    if set(map(type, items)) == {int}:
        ids: list[int] = items  # type: ignore[assignment]  # every element's type was just read
        if min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
            return ids
    checked: list[int] = []
    for item in items:
        token = as_integer(item)
        if token is None or not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(f"{name} must hold token ids from 0 to {MAX_TOKEN_ID}, got {shown(item)}", param=name)
        checked.append(token)
    return checked


def _take_logit_bias(fields: Fields) -> dict[int, float]:
    values = fields.mapping("logit_bias")
    if not values:
        return {}
    if len(values) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(values)} entries, the limit is {MAX_LOGIT_BIAS}", param="logit_bias")
    bias: dict[int, float] = {}
    wrong = [key for key in values if not _is_token_id(key)]
    if wrong:
        names = ", ".join(map(shown, wrong[:8])) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        what = f"keys {names}, which are no token ids" if len(wrong) > 1 else f"key {names}, which is no token id"
        raise RequestError(f"logit_bias has the {what}", param="logit_bias")
    for key, value in values.items():
        if (type(value) is not int and type(value) is not float) or not -100.0 <= value <= 100.0:
            raise fields.wrong("logit_bias", value, "a mapping of token ids to numbers in [-100, 100]")
        bias[int(key)] = float(value)
    return bias


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID


def _take_prompts(fields: Fields) -> list[str] | list[list[int]]:
    """Takes a prompt in any of its four forms: text, texts, token ids, lists of token ids."""
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt")
    if isinstance(value, str):
        prompts: list[object] = [value]
    elif isinstance(value, list):
        is_ids = bool(value) and all(type(item) is int or type(item) is float for item in value)
        prompts = [value] if is_ids else value
    else:
        raise fields.wrong("prompt", value, "text, a list of texts, token ids, or a list of lists of token ids")
    if len(prompts) > MAX_SEQUENCES:
        raise RequestError(f"prompt has {len(prompts)} entries, the limit is {MAX_SEQUENCES}", param="prompt")
    if not prompts or any(prompt in ("", []) for prompt in prompts):
        raise RequestError("prompt is empty: send at least one character or token", param="prompt", code="empty_prompt")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) == len(prompts):
        return texts
    ids = [_token_ids("prompt", prompt) for prompt in prompts if isinstance(prompt, list)]
    if len(ids) != len(prompts):
        raise fields.wrong("prompt", value, "text, a list of texts, token ids, or a list of lists of token ids")
    return ids


def _take_template_values(fields: Fields) -> dict[str, str | int | float | bool]:
    values = fields.mapping("chat_template_kwargs") or {}
    checked: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        param = "chat_template_kwargs"
        if name in RESERVED_TEMPLATE_NAMES or not name.isidentifier() or len(name) > 64:
            raise RequestError(f"{param} may not set {shown(name)}", param=param)
        if isinstance(value, (str, int, float, bool)):
            checked[name] = value
        elif value is not None:
            raise fields.wrong(param, value, "a mapping of names to strings, numbers and booleans")
    effort = fields.text(REASONING_EFFORT, 64)
    return {REASONING_EFFORT: effort, **checked} if effort is not None else checked


def _take_priority(fields: Fields) -> int:
    priority = fields.integer("priority", -(2**31), 2**31 - 1) or 0
    if priority < 0:
        raise PermissionDenied(
            f"priority {priority} is above this caller's class: a request may only lower itself (0 or more)",
            param="priority",
        )
    return priority


def _refuse_forbidden(fields: Fields) -> None:
    for name in sorted(fields.take_all(_FORBIDDEN)):
        raise RequestError(f"{name} cannot be set by a request", param=name, code="unsupported_parameter")
