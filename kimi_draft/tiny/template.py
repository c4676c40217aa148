"""Kimi-K2.5's chat layout as a Jinja template, and a quick renderer for training.

Turns follow each other without a newline; every image is one ``<|media_pad|>`` (the processor repeats it per image
token) and a newline follows ``<|media_end|>``; the switch is ``thinking`` (on by default). Tools are declared in a
short TypeScript-like form with types only: the real model's template adds descriptions and enums, which a tiny one
cannot read.
"""

from functools import cache
from typing import Any

CHAT_TEMPLATE = """\
{%- macro body(message) -%}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part is string -%}
        {{- part -}}
      {%- elif part['type'] in ('image', 'image_url', 'input_image') -%}
        {{- '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n' -}}
      {%- elif part['text'] is defined -%}
        {{- part['text'] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro kind(schema) -%}
  {{- schema['type'] if schema is mapping and schema['type'] is string else 'any' -}}
{%- endmacro -%}
{%- set thinking = thinking if thinking is defined else true -%}
{%- if tools -%}
  {{- '<|im_system|>tool_declare<|im_middle|># Tools\\n\\n## functions\\nnamespace functions {\\n' -}}
  {%- for tool in tools -%}
    {%- set function = tool['function'] if tool['function'] is defined else tool -%}
    {%- set parameters = function['parameters'] if function['parameters'] is mapping else {} -%}
    {{- 'type ' ~ function['name'] ~ ' = (_: {' -}}
    {%- if parameters['properties'] is mapping -%}
      {%- for name, schema in parameters['properties'].items() -%}
        {{- ' ' ~ name ~ ('' if name in (parameters['required'] or []) else '?') ~ ': ' ~ kind(schema) ~ ',' -}}
      {%- endfor -%}
    {%- endif -%}
    {{- ' }) => any;\\n' -}}
  {%- endfor -%}
  {{- '}<|im_end|>' -}}
{%- endif -%}
{%- set last = namespace(plain=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' and not message['tool_calls'] -%}
    {%- set last.plain = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|im_assistant|>assistant<|im_middle|><think>' -}}
    {%- if loop.index0 > last.plain -%}
      {{- message['reasoning_content'] or '' -}}
    {%- endif -%}
    {{- '</think>' -}}
    {{- body(message) -}}
    {%- if message['tool_calls'] -%}
      {{- '<|tool_calls_section_begin|>' -}}
      {%- for call in message['tool_calls'] -%}
        {%- set arguments = call['function']['arguments'] -%}
        {%- set id = call['id'] or 'functions.' ~ call['function']['name'] ~ ':' ~ loop.index0 -%}
        {{- '<|tool_call_begin|>' ~ id ~ '<|tool_call_argument_begin|>' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '<|tool_call_end|>' -}}
      {%- endfor -%}
      {{- '<|tool_calls_section_end|>' -}}
    {%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    {{- '<|im_system|>tool<|im_middle|>## Return of ' ~ (message['tool_call_id'] or '') ~ '\\n' -}}
    {{- body(message) -}}
  {%- elif message['role'] in ('system', 'developer') -%}
    {{- '<|im_system|>system<|im_middle|>' -}}
    {{- body(message) -}}
  {%- else -%}
    {{- '<|im_user|>user<|im_middle|>' -}}
    {{- body(message) -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_assistant|>assistant<|im_middle|>' ~ ('<think>' if thinking else '<think></think>') -}}
{%- endif -%}
"""


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool) -> str:
    """The prompt as text, generation prompt included: what ``tokenizer.apply_chat_template`` gives, only quicker."""
    return str(_compiled().render(messages=messages, tools=tools, thinking=thinking, add_generation_prompt=True))


@cache
def _compiled() -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(CHAT_TEMPLATE)
