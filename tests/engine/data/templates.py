"""Chat templates in the manner of well-known model families, written for these tests."""

CHATML = """
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

MARKED = """
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
<|im_start|>assistant{{- '\\n' -}}
{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}<|im_end|>{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

QWEN3 = """
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
{%- set index = (messages|length - 1) - loop.index0 -%}
{%- if ns.searching and message.role == 'user' -%}
{%- set ns.searching = false -%}{%- set ns.last_query = index -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if (loop.first and content) or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

GEMMA = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

GLM4 = """
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

# An R1 style: the prompt opens a thought that the rendering of a finished turn does not have.
OPENED_THOUGHT = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'].split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""

# Drops reasoning altogether, yet the prefixes agree.
THOUGHTLESS = OPENED_THOUGHT.replace("<think>\\n", "")

PLAIN = """
{%- for message in messages -%}
{{- message['role'] + ': ' + message['content'] + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

SILENT_ABOUT_SYSTEM = PLAIN.replace("messages -%}", "messages if message['role'] != 'system' -%}")
