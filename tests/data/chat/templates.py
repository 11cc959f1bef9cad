"""Chat templates written for the tests, one for each thing that published ones do."""

STOP = "<|im_end|>"
_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

PLAIN = "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT
"""Each message in marks of its own."""

THINKING = (
    "{% for m in messages %}{% if m.reasoning_content %}"
    "{{ '<|im_start|>assistant\n<think>\n' + m.reasoning_content + '\n</think>\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT
)
"""Keeps all reasoning."""

FORGETFUL = THINKING.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
"""Drops the reasoning of earlier turns."""

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT
)
"""Writes tools and calls."""

PARTS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + (
    "{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + _PROMPT
)
"""Reads contents in parts alone."""

BORROWED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A turn stops with the first token of the next message."""

OPEN_THOUGHT = PLAIN.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
"""Its generation prompt opens a thought that its history does not have."""

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)

GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _PROMPT
)
"""Marks what it trains, with the line end behind the stop token."""
