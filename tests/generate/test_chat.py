"""Chat templates: the prompts that transformers makes of the same conversations."""

import pytest

from paceline.config.errors import InputError
from paceline.generate.chat import ChatTemplate

TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hello\n"},
    {"role": "assistant", "content": "  Hi! "},
    {"role": "user", "content": "How are you?"},
]
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{%- if tools is not none %}{{ raise_exception("no tools") }}{%- endif %}
[SYS] {{ system_message }} {{ strftime_now("%Y") }}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | tojson }}{{ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- {"role": message.role, "text": message.content} | tojson(indent=2) }}
    {%- endif %}
{%- endfor %}
"""
ALTERNATE = """\
{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must take turns') }}
  {% endif %}
  {{ message['content'] }}
{% endfor %}
"""
SETTINGS = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "x_token": None}


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("add", [True, False])
def test_a_prompt_is_that_of_transformers(source, add):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [TALK], chat_template=source, add_generation_prompt=add, bos_token="<s>", eos_token="</s>"
    )
    prompt = ChatTemplate(source, SETTINGS).prompt(TALK, add_generation_prompt=add)
    assert prompt == rendered[0]
    assert "Be <brief> & kind." in prompt


def test_without_a_template_contents_follow_one_another():
    prompt = ChatTemplate(None, {}).prompt(TALK[1:], add_generation_prompt=True)
    assert prompt == "Hello\n\n  Hi! \nHow are you?\n"


def test_what_a_template_refuses_is_said():
    with pytest.raises(InputError, match="refuses the messages \\(roles must take turns\\)"):
        ChatTemplate(ALTERNATE, {}).prompt(TALK, add_generation_prompt=True)


def test_a_template_that_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="The chat template can't be read"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_hostile_template_reaches_nothing(source):
    with pytest.raises(InputError, match="refuses the messages"):
        ChatTemplate(source, {}).prompt(TALK, add_generation_prompt=True)
