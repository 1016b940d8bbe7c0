"""Answers of every dialect, and what they say, think and call."""

import json

from localllm.text.calls import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("get_weather", "other")
]
WEATHER = ToolCall("get_weather", {"city": "Paris", "days": 2})
OTHER = ToolCall("other", {})
ARGS = '{"city": "Paris", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
PYTHON = "get_weather(city='Paris', days=2)"
CALL_LIST = f'[{{"name": "get_weather", "arguments": {ARGS}}}]'
COHERE = (
    "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>\n"
    f'[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGS}}}]<|END_ACTION|>'
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{ARGS}"
)
GEMMA3 = "<start_of_turn>{{ .Tools }}"
HARMONY_START = "<|end|><|start|>assistant"

# name, texts of its template, end of the prompt, answer, content, thinking, calls
CASES = [
    ("hermes", "<tool_call>", "", f"Let me see.\n\n{HERMES}", "Let me see.", "", [WEATHER]),
    ("hermes twice", "<tool_call>", "", f"{HERMES}\n{HERMES}\n", "", "", [WEATHER, WEATHER]),
    ("hermes and text", "<tool_call>", "", f"{HERMES}\nDone.", "Done.", "", [WEATHER]),
    ("hermes unclosed", "<tool_call>", "", HERMES[:-13], "", "", [WEATHER]),
    (
        "hermes one mark for two",
        "<tool_call>",
        "",
        f'<tool_call>{{"name": "get_weather", "arguments": {ARGS}}}\n{{"name": "other"}}</tool_call>',
        "",
        "",
        [WEATHER, OTHER],
    ),
    (
        "a closing mark in a text",
        "<tool_call>",
        "",
        '<tool_call>{"name": "other", "arguments": {"a": "</tool_call> \\" }"}}</tool_call>',
        "",
        "",
        [ToolCall("other", {"a": '</tool_call> " }'})],
    ),
    (
        "qwen3",
        "<tool_call><think>",
        "",
        f"<think>\nWell,  well.\n</think>\n\nSee:\n{HERMES}",
        "See:",
        "Well,  well.",
        [WEATHER],
    ),
    (
        "a call ends the thinking",
        "<tool_call><think>",
        "",
        f"<think>\nHm.\n{HERMES}",
        "",
        "Hm.",
        [WEATHER],
    ),
    ("gemma3 python", GEMMA3, "", f"Ok:\n```tool_code\n{PYTHON}\n```", "Ok:", "", [WEATHER]),
    (
        "gemma3 printed twice",
        GEMMA3,
        "",
        f"```tool_code\nprint({PYTHON})\n```\n```tool_code\nother()\n```\nDone.",
        "Done.",
        "",
        [WEATHER, OTHER],
    ),
    ("gemma3 json", GEMMA3, "", f"```json\n{CALL_LIST}\n```", "", "", [WEATHER]),
    ("gemma3 bare", GEMMA3, "", CALL_LIST, "", "", [WEATHER]),
    (
        "gemma3 shows code",
        GEMMA3,
        "",
        'See:\n```json\n{"name": "x"}\n```\nand\n```py\nother()\n```\n',
        'See:\n```json\n{"name": "x"}\n```\nand\n```py\nother()\n```\n',
        "",
        [],
    ),
    ("opened by the prompt", "<think>", "<think>\n", "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", []),
    ("opened twice", "<think>", "<think>\n", "<think>\nHm.</think>Yes.", "Yes.", "Hm.", []),
    (
        "closed by the prompt",
        "<think>",
        "<think>\n\n</think>\n\n",
        "Yes </think>",
        "Yes </think>",
        "",
        [],
    ),
    ("never closed", "<think>", "", "<think>\nHm. And so on", "", "Hm. And so on", []),
    ("tags in the middle", "<think>", "", "Say <think>x</think>!", "Say <think>x</think>!", "", []),
    ("almost a tag", "<think>", "", " <thin king", " <thin king", "", []),
    ("only blanks", "<think>", "", " \n ", " \n ", "", []),
    ("blanks inside", "<tool_call>", "", "a  b\n\n\nc \n", "a  b\n\n\nc \n", "", []),
    (
        "broken call",
        "<tool_call>",
        "",
        "<tool_call>{x}</tool_call>y",
        "<tool_call>{x}</tool_call>y",
        "",
        [],
    ),
    ("cut call", "<tool_call>", "", HERMES[:40], HERMES[:40], "", []),
    (
        "string arguments",
        "<tool_call>",
        "",
        f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': ARGS})}</tool_call>",
        "",
        "",
        [WEATHER],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=",
        "",
        f"Ok.\n{CODER}\n{CODER}",
        "Ok.",
        "",
        [WEATHER, WEATHER],
    ),
    ("glm", "<tool_call><arg_key><think>", "", f"<think>Hm.</think>\n{GLM}", "", "Hm.", [WEATHER]),
    ("mistral", "[TOOL_CALLS]", "", f"[TOOL_CALLS] {CALL_LIST}", "", "", [WEATHER]),
    (
        "magistral",
        "[TOOL_CALLS][ARGS][THINK]",
        "",
        f"[THINK]Hm.[/THINK]Ok.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]other[CALL_ID]x1[ARGS]{{}}",
        "Ok.",
        "Hm.",
        [WEATHER, OTHER],
    ),
    (
        "command-r",
        "<|START_OF_TURN_TOKEN|> Action:",
        "",
        f'Action: ```json\n[{{"tool_name": "get_weather", "parameters": {ARGS}}}]\n```',
        "",
        "",
        [WEATHER],
    ),
    ("cohere call", "<|START_THINKING|><|START_ACTION|>", "", COHERE, "", "Hm.", [WEATHER]),
    (
        "cohere answer",
        "<|START_THINKING|><|START_ACTION|>",
        "",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        "Hm.",
        [],
    ),
    (
        "deepseek-r1",
        "<｜tool▁call▁begin｜><think>",
        "<think>\n",
        "Hm.</think>" + DEEPSEEK.format(f"function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```"),
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>",
        "",
        "Ok." + DEEPSEEK.format(f"get_weather<｜tool▁sep｜>{ARGS}"),
        "Ok.",
        "",
        [WEATHER],
    ),
    (
        "lfm2",
        "<|tool_call_start|>",
        "",
        f"<|tool_call_start|>[{PYTHON}, other()]<|tool_call_end|>Ok",
        "Ok",
        "",
        [WEATHER, OTHER],
    ),
    (
        "olmo3",
        "<function_calls>",
        "",
        f"<function_calls>\n{PYTHON}\nother()\n</function_calls>",
        "",
        "",
        [WEATHER, OTHER],
    ),
    ("granite", "<|tool_call|>", "", f"<|tool_call|>{CALL_LIST}", "", "", [WEATHER]),
    (
        "phi-4-mini",
        "<|tool_call|>",
        "",
        f"<|tool_call|>{CALL_LIST}<|/tool_call|>",
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3",
        '<|start_header_id|> "parameters":',
        "",
        f'\n{{"name": "get_weather", "parameters": {ARGS}}}',
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3 tag",
        '<|start_header_id|> "parameters":',
        "",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}',
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3 json",
        '<|start_header_id|> "parameters":',
        "",
        '{"name": "nobody", "parameters": {}} x',
        '{"name": "nobody", "parameters": {}} x',
        "",
        [],
    ),
    (
        "llama3 text",
        '<|start_header_id|> "parameters":',
        "",
        'So {"name": "other"}',
        'So {"name": "other"}',
        "",
        [],
    ),
    ("llama4", "<|header_start|>", "", f"[{PYTHON}]", "", "", [WEATHER]),
    ("llama4 list", "<|header_start|>", "", "[1, 2]", "[1, 2]", "", []),
    (
        "kimi",
        "<|tool_call_begin|>",
        "",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
        "Ok.",
        "",
        [WEATHER],
    ),
    ("nemotron", "<TOOLCALL>", "", f"<TOOLCALL>{CALL_LIST}</TOOLCALL>", "", "", [WEATHER]),
    ("apriel", "<tool_calls>", "", f"<tool_calls>{CALL_LIST}</tool_calls>", "", "", [WEATHER]),
    (
        "minimax",
        "<minimax:tool_call>",
        "",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        "",
        [WEATHER],
    ),
    (
        "glimmer",
        "<atem:function_calls>",
        "",
        '<atem:function_calls><atem:invoke name="other"></atem:invoke></atem:function_calls>',
        "",
        "",
        [OTHER],
    ),
    (
        "seed",
        "<seed:think><seed:tool_call>",
        "",
        "<seed:think>Hm.</seed:think><seed:tool_call><function=get_weather><parameter=city>Paris"
        "</parameter><parameter=days>2</parameter></function></seed:tool_call>",
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "lfm2 in JSON",
        "<|tool_call_start|>",
        "",
        f"<|tool_call_start|>{CALL_LIST}<|tool_call_end|>",
        "",
        "",
        [WEATHER],
    ),
    (
        "functiongemma",
        "<start_function_call>",
        "",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        "",
        "",
        [WEATHER],
    ),
    (
        "gemma4",
        "<|channel><|tool_call>",
        "",
        '<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "harmony call",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        HARMONY,
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "harmony recipient first",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        HARMONY.replace("assistant<", "assistant to=functions.other<")
        .replace(" to=functions.get_weather", "")
        .replace(ARGS, "{}")
        + "<|call|>",
        "",
        "Hm.",
        [OTHER],
    ),
    (
        "harmony answer",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <|x|>.",
        "Yes <|x|>.",
        "Hm.",
        [],
    ),
    (
        "harmony prefilled",
        "<|start|><|channel|><|message|>",
        HARMONY_START + "<|channel|>final<|message|>Once",
        " more.<|return|>",
        " more.",
        "",
        [],
    ),
    (
        "harmony without header",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "Hello <there>",
        "Hello <there>",
        "",
        [],
    ),
    (
        "harmony cut in a header",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "<|channel|>anal",
        "",
        "",
        [],
    ),
    ("plain", "", "", "<think>x</think><tool_call>{}", "<think>x</think><tool_call>{}", "", []),
]
