"""Chat templates: the same text as transformers gives, the form each wants, and no way to hurt the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from headrace.base.errors import HeadraceError, ModelFormatError, ModelUnsupportedError, RequestError
from headrace.testing.tiny_vocabulary import CHATML_TEMPLATE
from headrace.text import sandbox
from headrace.text.sandbox import SandboxLimits
from headrace.text.template import ChatTemplate, find_templates_in_files, find_templates_in_gguf

NOON = datetime(2026, 7, 26, 12, 0, 0)  # noqa: DTZ001
USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells <the> weather & more.", "parameters": {"type": "object"}},
}

Make = Callable[..., ChatTemplate]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ChatTemplate] = []

    def build(source: str | dict[str, str], **limits: float) -> ChatTemplate:
        sources = {"default": source} if isinstance(source, str) else source
        template = ChatTemplate(
            sources,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            now=lambda: NOON,
            limits=SandboxLimits(**limits),  # type: ignore[arg-type]
        )
        made.append(template)
        return template

    yield build
    for template in made:
        template.close()


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    template = ChatTemplate({"default": CHATML_TEMPLATE}, special_tokens={}, now=lambda: NOON)
    yield template
    template.close()


def test_chatml_is_rendered_with_and_without_the_opening_of_an_answer(chatml: ChatTemplate) -> None:
    assert chatml.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_whitespace_and_markup_of_the_message_stay_as_they_are(chatml: ChatTemplate) -> None:
    content = "  <b>\"q\" 'z' & é 🦊\n {{ messages }} {% raw %} \x00"

    assert content in chatml.render([{"role": "user", "content": content}])


@pytest.mark.parametrize("content", [None, "", []], ids=["null", "empty", "no_parts"])
def test_absent_content_is_empty_text(chatml: ChatTemplate, content: object) -> None:
    text = chatml.render([{"role": "assistant", "content": content}], add_generation_prompt=False)

    assert text == "<|im_start|>assistant\n<|im_end|>\n"


def test_text_parts_give_the_same_prompt_as_their_joined_text(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    assert chatml.render([{"role": "user", "content": parts}]) == chatml.render(
        [{"role": "user", "content": "one two"}]
    )


def test_a_template_that_reads_only_parts_gets_parts(make: Make) -> None:
    template = make("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}")

    assert template.form(has_tools=False).wants_parts
    assert template.render(USER) == "[Hi]"


def test_tool_arguments_take_the_form_that_the_template_prints(make: Make) -> None:
    show = "{% for m in messages %}{% for c in m.tool_calls or [] %}|{{ ARGS }}|{% endfor %}{% endfor %}"
    as_object = make(show.replace("ARGS", "c.function.arguments | tojson"))
    as_string = make(show.replace("ARGS", "'' + c.function.arguments"))

    for arguments in ('{"city": "Zürich"}', {"city": "Zürich"}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert as_object.render(messages) == '|{"city": "Zürich"}|'
        assert as_string.render(messages) == '|{"city": "Zürich"}|'


def test_tools_are_shown_without_html_escapes_and_choose_the_tool_template(make: Make) -> None:
    template = make({"default": "plain", "tool_use": "{% for t in tools %}{{ t | tojson }}{% endfor %}"})

    assert template.form(has_tools=True).takes_tools
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[WEATHER]) == json.dumps(WEATHER)


TRANSFORMERS_NAMES = {
    "trim_and_lstrip": ("{% if true %}\n   {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n"),
    "loop_controls": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "generation": ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
    "generation_scope": (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}",
        "1",
    ),
    "strftime_now": ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2026"),
    "namespace": ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}", "2"),
    "dict": ("{{ dict(a=1) | tojson }}", '{"a": 1}'),
    "tojson_options": ("{{ {'b': 'é', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "é"\n}'),
    "special_tokens": ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    "tools_none": ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    "undefined": ("[{{ nothing }}]", "[]"),
}


@pytest.mark.parametrize(("source", "text"), TRANSFORMERS_NAMES.values(), ids=TRANSFORMERS_NAMES)
def test_templates_find_what_transformers_gives_them(make: Make, source: str, text: str) -> None:
    assert make(source).render(USER) == text


def test_a_refusal_is_a_400_with_the_template_s_own_words(make: Make) -> None:
    template = make("{{ raise_exception('System role not supported') }}")

    with pytest.raises(RequestError, match="refuses these messages: System role not supported") as caught:
        template.render(USER)

    assert caught.value.stable_code == "template_refused"
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ messages | sum }}", "{{ 'a' + 1 }}"],
    ids=["undefined", "zero", "filter", "types"],
)
def test_a_template_that_fails_on_the_messages_is_a_400(make: Make, source: str) -> None:
    with pytest.raises(RequestError, match="cannot render these messages") as caught:
        make(source).render(USER)

    assert caught.value.stable_code == "template_failed"


def test_continuing_the_last_message_leaves_it_open(chatml: ChatTemplate) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]

    text = chatml.render(messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "


def test_continuing_follows_a_template_that_trims(make: Make) -> None:
    template = make("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")

    text = template.render(
        [{"role": "assistant", "content": " Well,  "}], add_generation_prompt=False, continue_final_message=True
    )

    assert text == "<Well,"


def test_continuing_and_beginning_an_answer_contradict(chatml: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="choose one"):
        chatml.render(USER, continue_final_message=True)


def test_only_the_template_s_own_variables_can_be_set(make: Make) -> None:
    template = make("{% set local = 1 %}{% if enable_thinking %}think{% else %}answer{% endif %}{{ range(1) | list }}")

    assert template.form(has_tools=False).variables == {"enable_thinking"}
    assert template.split_kwargs({"enable_thinking": True, "other": 1}) == ({"enable_thinking": True}, ["other"])
    assert template.render(USER, kwargs={"enable_thinking": True, "other": 1}) == "think[0]"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": "x"},
        {"bos_token": "x"},
        {"raise_exception": 1},
        {"__class__": 1},
        {"x": {}},
        {"x": [1]},
        {"x": "a" * 4097},
    ],
    ids=["messages", "bos", "function", "underscore", "object", "list", "long"],
)
def test_reserved_names_and_values_that_are_not_plain_are_refused(
    chatml: ChatTemplate, kwargs: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.") as caught:
        chatml.render(USER, kwargs=kwargs)

    assert caught.value.param is not None


def test_a_model_without_template_says_what_to_do() -> None:
    template = ChatTemplate({}, special_tokens={}, now=lambda: NOON)

    assert not template.is_present
    with pytest.raises(RequestError, match="no chat template") as caught:
        template.render(USER)
    assert caught.value.hint is not None
    assert "/v1/completions" in caught.value.hint


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ 1 | attr('x') }}"])
def test_a_malformed_template_is_refused_at_load(make: Make, source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template is malformed"):
        make(source)


# Each grows in one way only when it meets messages, so that loading it (which tries short messages) succeeds.
WHEN_ASKED = "{% if messages[0].content == 'go' %}BOMB{% endif %}"
BOMBS = {
    "long_loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge_range": "{% for a in range(10**9) %}{{ a }}{% endfor %}",
    "huge_string": "{{ ('a' * 10**10) | length }}",
    "doubling": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "big_list": "{{ ([[1]] * 10**9) | length }}",
    "big_power": "{% set n = namespace(x=10) %}{% for i in range(9) %}{% set n.x = n.x ** 10 %}{% endfor %}",
    "wide_format": "{{ '%1000000000d' % 1 }}",
    "wide_method": "{{ 'x'.rjust(10**9) }}",
    "long_output": "{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "quadratic_replace": "{% set s = 'ab' * 4000000 %}{% for i in range(1000) %}{{ s.count('ba') }}{% endfor %}",
    "long_sum": "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set x = l | sum %}{% endfor %}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_fails_alone_and_the_next_render_works(make: Make, bomb: str) -> None:
    template = make(WHEN_ASKED.replace("BOMB", bomb) + "{{ messages[0].content }}")

    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "go"}])

    assert caught.value.stable_code in ("template_too_expensive", "template_failed")
    assert template.render(USER) == "Hi"


def test_a_template_that_is_a_bomb_at_load_is_refused(make: Make) -> None:
    with pytest.raises(ModelUnsupportedError, match="too much time"):
        make("{{ 3 ** (10 ** 8) }}", load_cpu_s=0.2)


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "init_globals": "{{ raise_exception.__globals__ }}",
    "closure": "{{ strftime_now.__self__.__class__ }}",
    "method_globals": "{{ namespace.__init__.__globals__['os'].getpid() }}",
    "subscript": "{{ ''['__class__'] }}",
    "map_attribute": "{{ ['x'] | map(attribute='__class__') | list | first | string }}",
    "format": "{{ '{0.__class__}'.format('x') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "indirect_format": "{% set f = '{0.__class__}'.format %}{{ f('x') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "loop": "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "caller_frame": "{{ (messages | map('string')).gi_frame }}",
    "mutation": "{{ messages.append(1) }}",
    "dict_mutation": "{{ messages[0].update({'a': 1}) }}",
    "namespace_name": "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
    "import": "{% import '/etc/passwd' as x %}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_ways_out_of_the_sandbox_lead_nowhere(make: Make, source: str) -> None:
    try:
        text = make(source).render(USER)
    except HeadraceError:
        return
    assert text == "" or set(text) <= set("[]")
    assert "class" not in text


def test_the_child_is_replaced_when_it_dies_between_renders(chatml: ChatTemplate) -> None:
    before = chatml.child_pid
    assert before is not None
    os.kill(before, 9)

    text = chatml.render(USER)

    assert text.endswith("assistant\n")
    assert chatml.child_pid != before


def test_the_child_cannot_open_files_and_ends_with_its_input(make: Make) -> None:
    template = make("x")
    pid = template.child_pid
    limits = Path(f"/proc/{pid}/limits").read_text()

    assert any(line.split()[3:5] == ["0", "0"] for line in limits.splitlines() if line.startswith("Max open files"))
    template.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_child_ends_when_its_parent_is_killed() -> None:
    code = (
        "import os; from datetime import datetime; from headrace.text.template import ChatTemplate;"
        "template = ChatTemplate({'default': 'x'}, special_tokens={}, now=datetime.now);"
        "print(template.child_pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}

    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, check=False)

    assert parent.returncode == -9
    folder = Path(f"/proc/{int(parent.stdout)}")
    for _ in range(600):  # it ends as soon as it is scheduled
        if not folder.exists() or (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        threading.Event().wait(0.05)
    raise AssertionError("the template process outlives its parent")


def test_long_text_renders_within_the_default_limits(chatml: ChatTemplate) -> None:
    content = "🦊" * 500_000

    assert chatml.render([{"role": "user", "content": content}]).count("🦊") == 500_000


def test_templates_are_found_in_files_in_order_of_preference(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_text("from jinja")
    files = {"tokenizer_config.json": config}

    config.write_text(json.dumps({"chat_template": "from config"}))
    assert find_templates_in_files(files) == {"default": "from config"}
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]})
    )
    assert find_templates_in_files(files) == {"default": "a", "rag": "b"}
    assert find_templates_in_files({**files, "chat_template.jinja": jinja}) == {"default": "from jinja"}
    config.write_text("{}")
    assert find_templates_in_files(files) == {}
    assert find_templates_in_files({}) == {}


def test_templates_are_found_in_gguf_metadata() -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["x"],
    }

    assert find_templates_in_gguf(metadata) == {"default": "a", "tool_use": "b"}
    assert find_templates_in_gguf({}) == {}


@pytest.mark.parametrize("value", [7, "x" * (2**18 + 1)], ids=["number", "long"])
def test_templates_that_are_not_text_or_too_long_are_refused(value: object) -> None:
    with pytest.raises(ModelFormatError, match="chat template"):
        find_templates_in_gguf({"tokenizer.chat_template": value})
