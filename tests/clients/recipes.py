"""Modelfile recipes by which a model of 135M parameters shows what large ones can do.

It copies the pattern of the examples that stand before every chat: greedily, every time.
"""

from typing import Any

CHATML = """\
{{- range .Messages }}<|im_start|>{{ .Role }}
%s{{ .Content }}%s<|im_end|>
{{ end }}<|im_start|>assistant
"""
CALL = """\
<tool_call>
{"name": "%s", "arguments": %s}
</tool_call>"""


def _turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    """Example questions and answers."""
    return [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair)
    ]


def _weather(city: str) -> tuple[str, str]:
    return f"How is the weather in {city}?", CALL % ("get_weather", f'{{"city": "{city}"}}')


TOOLS: dict[str, Any] = {
    "template": CHATML
    % (
        '{{ if and (eq .Role "system") $.Tools }}{{ $.Tools }}\n{{ end }}',
        "{{ range .ToolCalls }}"
        + CALL % ("{{ .Function.Name }}", "{{ .Function.Arguments }}")
        + "{{ end }}",
    ),
    "messages": _turns(*map(_weather, ("London", "Rome", "Tokyo"))),
    "parameters": {"temperature": 0, "num_predict": 40},
}


def _thought(number: int) -> str:
    """An example as the template's own text: thoughts of past turns are left out of messages."""
    return (
        f"<|im_start|>user\nWhat is {number} + {number}?<|im_end|>\n<|im_start|>assistant\n"
        f"{{{{ if ne .Think false }}}}<think>\n{number} and {number} make {2 * number}.\n</think>\n\n{{{{ end }}}}"
        f"It is {2 * number}.<|im_end|>\n"
    )


THINKING: dict[str, Any] = {
    "template": "".join(map(_thought, (1, 2, 3))) + CHATML % ("", ""),
    "parameters": {"temperature": 0, "num_predict": 60},
}
QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
PUZZLE = [{"role": "user", "content": "What is 4 + 4?"}]
