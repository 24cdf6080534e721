"""Chat templates that use what published ones use, in the layouts of several families."""

# Kimi: roles as special tokens, a default system message, tools as JSON, parts, reasoning.
KIMI = """\
{%- macro words(message) -%}
  {%- set content = message.get('content') -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part['type'] == 'text' -%}{{ part['text'] }}
      {%- else -%}<|media_begin|>{{ part['type'] }}<|media_end|>{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tools<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You help.<|im_end|>
  {%- endif -%}
  {%- set name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
<|im_assistant|>{{ name }}<|im_middle|><think>{{ message.get('reasoning_content', '') }}</think>
  {%- else -%}<|im_system|>{{ name }}<|im_middle|>
  {%- endif -%}
  {%- if message['role'] == 'tool' -%}
{{ '## Return of ' ~ message.tool_call_id ~ '\n' }}
  {%- endif -%}
  {{ words(message) }}
  {%- if message.get('tool_calls') -%}<|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
{%- else %}{{ call['function']['arguments'] | tojson }}{% endif -%}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{{ '</think>' if thinking is false }}
{%- endif -%}
"""

# DeepSeek: bos_token, one system text collected first, reasoning cut off by split.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system='', first=true, tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- if not ns.first %}{% set ns.system = ns.system + '\n\n' %}{% endif %}
        {%- set ns.system = ns.system + message['content'] %}
        {%- set ns.first = false %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- if tools %}
{{ '\n## Tools' }}
    {%- for tool in tools %}
{{ '\n' + tool.function.name + ': ' + tool.function.description | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages if message['role'] != 'system' %}
    {%- if message['role'] == 'user' %}
{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>', 1)[-1].lstrip('\n') %}
        {%- endif %}
{{- '<｜Assistant｜>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}
"""

# The rest: generation blocks, whitespace control, loop controls, errors, tests, slices, dates.
BLOCKS = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] | trim %}
    {% set rest = messages[1:] %}
{% else %}
    {% set system, rest = 'You help in ' ~ strftime_now('%Y'), messages %}
{% endif %}
<think>{{ system }}</think>

{% for message in rest %}
    {% if message['role'] not in ('user', 'assistant', 'tool') %}
        {% continue %}
    {% elif (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Turns must alternate, and message ' ~ loop.index ~ ' does not') }}
    {% endif %}
    {% if message.content.startswith('<think>') and not message.content.endswith('>') %}
{{ message.role | upper }}: {{ message.content | replace('\n', ' ') | trim }}
    {% elif message.role == 'assistant' %}
{{ message.role }}: {% generation %}{{ message.content.rstrip() }}{{ eos_token }}{% endgeneration %}

    {% else %}
{{ message.role | capitalize }}: {{ message['content'].strip() | default('', true) }}<|EOT|>
    {% endif %}
    {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{% for tool in tools or [] %}{{ loop.cycle('a', 'b') }}{{ tool | tojson }}{% endfor %}
{{ {'b': 1, 'a': [true, none, 1.5]} | tojson(sort_keys=true) }}
{% if add_generation_prompt %}
<｜Assistant｜>{% endif %}
"""

TEMPLATES = {"kimi": KIMI, "deepseek": DEEPSEEK, "blocks": BLOCKS}

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
)
GREEDY = (
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ '%0999999999d' % 1 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 'ab'.replace('', 'x' * 10 ** 7) | replace('', 'y' * 10 ** 7) }}",
)
HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.sys }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ self.__init__.__globals__ }}",
)
