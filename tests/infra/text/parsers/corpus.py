"""Answers as models of each format write them, and what they say."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """``calls``: (name, arguments) to the letter; None as content: there is none beside thoughts or calls."""

    reasoning: str
    tools: str
    text: str
    content: str | None
    thought: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    options: dict[str, Any] = {}


WEATHER = '{"city": "Zürich", "days": 3}'
TIME = '{"zone": "CET", "parts": ["h", "m"], "of": {"a": {"b": "}"}}}'
CODE = '{"code": "print(\\"</tool_call>\\")\\n[1]", "run": true}'
TEXTS = {"get_weather": {"city": False}, "write": {"path": False, "text": False, "note": True}}

HERMES = [
    Case("", "hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', None,
         calls=(("get_weather", WEATHER),)),
    Case("", "hermes",
         f'I will look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n<tool_call>\n'
         f'{{"name": "get_time", "arguments": {TIME}}}\n</tool_call>', "I will look.",
         calls=(("get_weather", WEATHER), ("get_time", TIME))),
    Case("", "hermes", f'<tool_call>{{"name": "run", "arguments": {CODE}}}</tool_call>', None, calls=(("run", CODE),)),
    Case("", "hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather", "id": 7}}</tool_call>\nDone.',
         "Done.", calls=(("get_weather", WEATHER),)),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', None,
         calls=(("a", '{"x": 1}'),)),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>', None, calls=(("a", "{}"),)),
    Case("", "hermes", '<tool_call>{"name": "a"}</tool_call>', None, calls=(("a", "{}"),)),
    Case("", "hermes", '<tool_call>\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}\n</tool_call>',
         None, calls=(("a", "{}"), ("b", "{}"))),
    # arguments that are empty
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": ""}</tool_call>', None, calls=(("a", "{}"),)),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": " "}</tool_call> So.', "So.", calls=(("a", "{}"),)),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": }</tool_call>', None, calls=(("a", "{}"),)),
    Case("", "llama3_json", '{"name": "a", "parameters": ""}', None, calls=(("a", "{}"),)),
    Case("", "nemotron_deci", '<TOOLCALL>[{"name": "a", "arguments": ""}, {"name": "b", "arguments": null}]</TOOLCALL>',
         None, calls=(("a", "{}"), ("b", "{}"))),
    Case("", "mistral", '[TOOL_CALLS][{"name": "a", "arguments": ""}]', None, calls=(("a", "{}"),)),
    Case("", "mistral", '[TOOL_CALLS]a[ARGS]""[TOOL_CALLS]b[ARGS][TOOL_CALLS]c[ARGS]', None,
         calls=(("a", "{}"), ("b", "{}"), ("c", "{}"))),
    # one brace too few: what is there is handed on
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": {"x": {"y": 1}</tool_call> So.', "So.",
         calls=(("a", '{"x": {"y": 1}'),)),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": {}, oops}</tool_call>', ", oops}</tool_call>",
         calls=(("a", "{}"),)),
    # cut off by max_tokens
    Case("", "hermes", 'Well.\n<tool_call>\n{"name": "a", "arguments": {"x": "lo', "Well.",
         calls=(("a", '{"x": "lo'),)),
    Case("", "hermes", 'Well.\n<tool_call>\n{"name": "get_we', 'Well.\n<tool_call>\n{"name": "get_we'),
    # line breaks within texts, which JSON has escaped
    Case("", "hermes", '<tool_call>\n{"name": "a", "arguments": {\n"x": "1\n\t2\\\\\n", "y": "\\n"}}\n</tool_call>',
         None, calls=(("a", '{\n"x": "1\\n\\t2\\\\\\n", "y": "\\n"}'),)),
    Case("", "hermes", '<tool_call>{"arguments": {"x": "1\n2"}, "name": "a"}</tool_call>', None,
         calls=(("a", '{"x": "1\\n2"}'),)),
    Case("", "hermes", '<tool_call>{"name": "a", "args": {"x": 1}}</tool_call><tool_call>'
         '{"input": {"y": 2}, "name": "b"}</tool_call>', None, calls=(("a", '{"x": 1}'), ("b", '{"y": 2}'))),
    Case("", "hermes", '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', None,
         calls=(("a", '{"x": "</tool_call>"}'),)),
    # look-alikes
    Case("", "hermes", "Write <tool_call> and then JSON, as in <tool", "Write <tool_call> and then JSON, as in <tool"),
    Case("", "hermes", 'It is {"name": "a", "arguments": {}} in JSON.\n',
         'It is {"name": "a", "arguments": {}} in JSON.\n'),
    Case("", "hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>"),
    Case("", "hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
         '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    Case("", "hermes", '<tool_call>oops <tool_call>{"name": "a", "arguments": {}}</tool_call>', "<tool_call>oops",
         calls=(("a", "{}"),)),
    Case("", "hermes", "  \n plain text \n ", "  \n plain text \n "),
    Case("", "hermes", '{"name": "a", "arguments": {}}', '{"name": "a", "arguments": {}}'),
]  # fmt: skip

THINK = [
    Case("qwen3", "", "<think>\nFirst this,\n\nthen that.\n</think>\n\nThe answer is 4.\n", "The answer is 4.\n",
         "First this,\n\nthen that."),
    Case("qwen3", "", "No thoughts, only </think> as text.", "No thoughts, only </think> as text."),
    Case("qwen3", "", "<think>\n\n</think>\n\nQuick.", "Quick."),
    Case("basic", "", "<think>cut in the mid", None, "cut in the mid"),
    Case("basic", "", "In HTML there is no <think> tag.", "In HTML there is no <think> tag."),
    Case("basic", "", "\n <thin", "\n <thin"),
    Case("deepseek_r1", "", "Hmm, 2+2.\n</think>\n\n4", "4", "Hmm, 2+2.", options={"thinking": True}),
    Case("deepseek_r1", "", "<think>\nAgain.</think>4", "4", "Again.", options={"thinking": True}),
    Case("deepseek_r1", "", "4", "4"),
    Case("nemotron_deci", "", "<think>a < b and a <think> again</think>ok", "ok", "a < b and a <think> again"),
    Case("mistral", "", "[THINK]Il faut [voir].[/THINK]Voilà.", "Voilà.", "Il faut [voir]."),
    Case("mistral", "", "[THI", "[THI"),
    Case("kimi", "", "◁think▷Hm.◁/think▷Yes.", "Yes.", "Hm."),
    Case("granite", "", "Here is my thought process:\nLet us see.\nHere is my response:\n42", "42", "Let us see."),
    Case("granite", "", "Here's my thought process: a. Here's my response: b.", "b.", "a."),
    Case("granite", "", "Here is my cat. Here is my response: no.", "Here is my cat. Here is my response: no."),
    Case("qwen3", "hermes",
         f'<think>\nThey want <tool_call> of weather.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": '
         f"{WEATHER}}}\n</tool_call>", None, "They want <tool_call> of weather.", (("get_weather", WEATHER),)),
    # a call that the model tries in its thoughts is none
    Case("qwen3", "hermes",
         '<think>maybe <tool_call>{"name":"w","arguments":{}}</tool_call> no, wait</think>Final.', "Final.",
         'maybe <tool_call>{"name":"w","arguments":{}}</tool_call> no, wait'),
    Case("qwen3", "hermes",
         'a <tool_call>{"name":"w","arguments":{"x": "</think>"}}</tool_call> or <tool_call>{"name":"v","arguments":{}}'
         '</tool_call>?\n</think>\n<tool_call>{"name":"u","arguments":{}}</tool_call>', None,
         'a <tool_call>{"name":"w","arguments":{"x": "</think>"}}</tool_call> or <tool_call>{"name":"v","arguments":{}}'
         "</tool_call>?", (("u", "{}"),), {"thinking": True}),
    Case("mistral", "mistral", "[THINK]So [TOOL_CALLS]a[ARGS]{}? No.[/THINK]Voilà.", "Voilà.",
         "So [TOOL_CALLS]a[ARGS]{}? No."),
    Case("glm45", "glm45", "<think>a <tool_call>now\n</tool_call> b</think>c", "c", "a <tool_call>now\n</tool_call> b"),
    Case("deepseek_r1", "qwen3_coder",
         "a <tool_call><function=now></function></tool_call> b</think>c", "c",
         "a <tool_call><function=now></function></tool_call> b", options={"thinking": True}),
    # thoughts that are not closed before the call
    Case("qwen3", "hermes", '<think>\nI call.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
         '<tool_call>{"name": "b", "arguments": {}}</tool_call>\nDone.', "Done.", "I call.",
         (("a", "{}"), ("b", "{}"))),
    Case("qwen3", "hermes", '<think>\nI call.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', None,
         "I call.", (("a", "{}"),)),
    Case("glm45", "glm45", "<think></think>\n<tool_call>a\n</tool_call>", None, None, (("a", "{}"),)),
]  # fmt: skip

MISTRAL = [
    Case("", "mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]', None,
         calls=(("get_weather", WEATHER),)),
    Case("", "mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": "]"}}]', None,
         calls=(("a", "{}"), ("b", '{"x": "]"}'))),
    Case("", "mistral", f"Je regarde.[TOOL_CALLS]get_weather[ARGS]{WEATHER}", "Je regarde.",
         calls=(("get_weather", WEATHER),)),
    Case("", "mistral", '[TOOL_CALLS]a[CALL_ID]x1y2z3a4b[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', None,
         calls=(("a", '{"x": 1}'), ("b", "{}"))),
    Case("", "mistral", '[TOOL_CALLS]a{"x": 1}', None, calls=(("a", '{"x": 1}'),)),
    Case("mistral", "mistral", "[THINK]Weather.[/THINK][TOOL_CALLS]a[ARGS]{}", None, "Weather.", (("a", "{}"),)),
    Case("", "mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": [1,', None, calls=(("a", '{"x": [1,'),)),
    Case("", "mistral", "[TOOL_CALLS] none needed", "[TOOL_CALLS] none needed"),
    Case("", "mistral", "The list [TOOL is [1, 2].", "The list [TOOL is [1, 2]."),
]  # fmt: skip

LLAMA = [
    Case("", "llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', None,
         calls=(("get_weather", WEATHER),)),
    Case("", "llama3_json", f'<|python_tag|>{{"type": "function", "name": "get_time", "parameters": {TIME}}}', None,
         calls=(("get_time", TIME),)),
    Case("", "llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {"x": 1}}', None,
         calls=(("a", "{}"), ("b", '{"x": 1}'))),
    Case("", "llama3_json", '{"name": "a", "parameters": {}}\n{"name": "b", "parameters": {"x": 1}}\nSo.', "So.",
         calls=(("a", "{}"), ("b", '{"x": 1}'))),
    Case("", "llama3_json", '{"name": "a", "parameters": {}}\n{"name": "Alice", "age": 7}',
         '{"name": "Alice", "age": 7}', calls=(("a", "{}"),)),
    Case("", "llama3_json", '{"name": "a", "args": {}}', '{"name": "a", "args": {}}'),
    Case("", "llama3_json", '{"name": "Alice", "age": 7}', '{"name": "Alice", "age": 7}'),
    Case("", "llama3_json", '{"name": "Alice"}', '{"name": "Alice"}'),
    Case("", "llama3_json", 'Use {"name": "a", "parameters": {}} for it.',
         'Use {"name": "a", "parameters": {}} for it.'),
    Case("", "llama3_json", '{"name": "a", "parameters": {"x": "y', None, calls=(("a", '{"x": "y'),)),
    Case("", "llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Case("", "pythonic", '[get_weather(city="Zürich", days=3), get_time(zone=\'C"E)T\', parts=["h", \'m\'])]', None,
         calls=(("get_weather", '{"city":"Zürich","days":3}'), ("get_time", '{"zone":"C\\"E)T","parts":["h","m"]}'))),
    Case("", "llama4_pythonic", "<|python_start|>[a(x={'k': None, 'n': -1.5, 't': true})]<|python_end|>", None,
         calls=(("a", '{"x":{"k":null,"n":-1.5,"t":true}}'),)),
    Case("", "pythonic", "[now()]", None, calls=(("now", "{}"),)),
    Case("", "pythonic", "[1] See the first source.", "[1] See the first source."),
    Case("", "pythonic", "[see(here)]", "[see(here)]"),
    Case("", "pythonic", "[run(x=__import__('os'))]", "[run(x=__import__('os'))]"),
    Case("", "pythonic", "[a(**{'x': 1})]", "[a(**{'x': 1})]"),
    Case("", "pythonic", "[a(x=1e999)]", "[a(x=1e999)]"),
    Case("", "pythonic", "[a(x=[-1e999])]", "[a(x=[-1e999])]"),
    Case("", "pythonic", "[a(x=1), b(y=", ", b(y=", calls=(("a", '{"x":1}'),)),
    Case("", "pythonic", "Call [a(x=1)] for it.", "Call [a(x=1)] for it."),
    Case("", "lfm2", "<|tool_call_start|>[run(code='''a\n\\n''', more='b\nc \"\\\nd')]<|tool_call_end|>", None,
         calls=(("run", '{"code":"a\\n\\n","more":"b\\nc \\"d"}'),)),
    Case("", "lfm2", "<|tool_call_start|>[run(code='a\\\\\nb')]<|tool_call_end|>", None,
         calls=(("run", '{"code":"a\\\\\\nb"}'),)),
    Case("", "lfm2", "<|tool_call_start|>[at(month=07, parts=[007, 0, 0.5, 1e05], text='07 \0')]<|tool_call_end|>",
         None, calls=(("at", '{"month":7,"parts":[7,0,0.5,100000.0],"text":"07 \\u0000"}'),)),
    Case("", "lfm2", "<|tool_call_start|>[label(tags={'a', 'b'})]<|tool_call_end|>", None,
         calls=(("label", '{"tags":["a","b"]}'),)),
    Case("", "lfm2", f'Hm. <|tool_call_start|>{{"name": "a", "arguments": {WEATHER}}}<|tool_call_end|>', "Hm.",
         calls=(("a", WEATHER),)),
    *(Case("", "lfm2", f'<|tool_call_start|>{{"name": "a", "arguments": {WEATHER}}}{between}'
           f'{{"name": "b", "arguments": {TIME}}}{{"name": "c"}}{end}<|tool_call_end|>', None,
           calls=(("a", WEATHER), ("b", TIME), ("c", "{}")))
      for between, end in (("\n", ""), (", ", ","), ("", "\n"), (" ;\n", " "))),
    Case("", "lfm2", '<|tool_call_start|>{"name": "a", "arguments": {}}, see', ", see", calls=(("a", "{}"),)),
]  # fmt: skip

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = [
    Case("", "deepseek_v3",
         "I look.<｜tool▁calls▁begin｜>" + _V3.format("get_weather", WEATHER) + "\n" + _V3.format("get_time", TIME)
         + "<｜tool▁calls▁end｜>", "I look.", calls=(("get_weather", WEATHER), ("get_time", TIME))),
    Case("deepseek_r1", "deepseek_v3",
         "Hm.\n</think>\n\n<｜tool▁calls▁begin｜>" + _V3.format("a", "{}") + "<｜tool▁calls▁end｜>", None, "Hm.",
         (("a", "{}"),), {"thinking": True}),
    Case("", "deepseek_v3", "<｜tool▁calls▁begin｜>" + _V3.format("a", "") + _V3.format("b", '""')
         + "<｜tool▁calls▁end｜>", None, calls=(("a", "{}"), ("b", "{}"))),
    Case("", "deepseek_v31", "<｜tool▁calls▁begin｜>" + _V31.format("a", "") + _V31.format("b", "null")
         + "<｜tool▁calls▁end｜>", None, calls=(("a", "{}"), ("b", "{}"))),
    # as the other model is meant to write them
    Case("", "deepseek_v31", "<｜tool▁calls▁begin｜>" + _V3.format("a", '{"x": 1}') + "\n" + _V3.format("b", "")
         + "<｜tool▁calls▁end｜>", None, calls=(("a", '{"x": 1}'), ("b", "{}"))),
    Case("", "deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>```json\n{"x": "```"}\n```'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>So.", "So.", calls=(("a", '{"x": "```"}'),)),
    Case("", "deepseek_v31", "<｜tool▁calls▁begin｜>" + _V31.format("function", "{}") + "<｜tool▁calls▁end｜>", None,
         calls=(("function", "{}"),)),
    Case("", "deepseek_v3", "<｜tool▁calls▁begin｜>" + _V31.format("a", '{"x": 1}')
         + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n{"y": 2}\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>', None,
         calls=(("a", '{"x": 1}'), ("b", '{"y": 2}'))),
    Case("", "deepseek_v3", "<｜tool▁calls▁begin｜>function a", "<｜tool▁calls▁begin｜>function a"),
    Case("", "deepseek_v3_1",
         "<｜tool▁calls▁begin｜>" + _V31.format("get_weather", WEATHER) + _V31.format("run", CODE)
         + "<｜tool▁calls▁end｜>", None, calls=(("get_weather", WEATHER), ("run", CODE))),
    Case("", "deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{"x": "y', None,
         calls=(("a", '{"x": "y'),)),
    Case("", "deepseek_v3_1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁s",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁s"),
]  # fmt: skip

KIMI = [
    Case("", "kimi_k2",
         f"Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
         f"<|tool_call_argument_begin|>{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{TIME}"
         f"<|tool_call_end|><|tool_calls_section_end|>", "Let me see.",
         calls=(("get_weather", WEATHER), ("get_time", TIME))),
    Case("kimi_k2", "kimi_k2",
         "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}"
         "<|tool_call_end|><|tool_calls_section_end|>", None, "Hm.", (("a", "{}"),)),
    Case("", "kimi_k2",
         "<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|><|tool_call_end|>"
         '<|tool_call_begin|>functions.w:1<|tool_call_argument_begin|>""<|tool_call_end|><|tool_calls_section_end|>',
         None, calls=(("w", "{}"), ("w", "{}"))),
    Case("", "kimi_k2",
         "<|tool_calls_section_begin|><|tool_call_begin|>functions.w<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_call_begin|>functions_w_1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>w:2"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|> w <|tool_call_argument_begin|>{}"
         "<|tool_call_end|><|tool_call_begin|>functions.page_2:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>", None, calls=(*[("w", "{}")] * 4, ("page_2", "{}"))),
    Case("", "kimi_k2",
         "See.<|tool_call_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_call_section_end|>", "See.", calls=(("w", "{}"),)),
    Case("", "kimi_k2", "<|tool_calls_section_begin|> none", "<|tool_calls_section_begin|> none"),
    Case("", "kimi_k2", "So.<|tool_call_end|><|tool_calls_section_end|>", "So."),
    Case("", "kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}"
         "<|tool_call_end|><|tool_calls_section_end|>", None, calls=(("w", "{}"),), options={"functions": ("w",)}),
]  # fmt: skip

MARKUP = [
    Case("", "qwen3_coder",
         "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n007\n</parameter>\n<parameter=days>\n3\n"
         "</parameter>\n</function>\n</tool_call>", "I look.",
         calls=(("get_weather", '{"city": "007", "days": 3}'),), options={"texts": TEXTS}),
    Case("", "qwen3_coder",
         "<tool_call>\n<function=write>\n<parameter=text>\n\n<b>\"one\"</b>\n\ntwo\n\n</parameter>\n<parameter=note>\n"
         "null\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
         "<parameter=word>\nhello\n</parameter>\n</function>\n</tool_call>", None,
         calls=(("write", '{"text": "\\n<b>\\"one\\"</b>\\n\\ntwo\\n", "note": null, "deep": {"a": [1]}, "on": true, '
                          '"word": "hello"}'),), options={"texts": TEXTS}),
    Case("", "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
         "</function>\n</tool_call>", None, calls=(("now", "{}"), ("now", "{}"))),
    Case("", "qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\ncut \"of", None,
         calls=(("write", '{"text": "cut \\"of'),), options={"texts": TEXTS}),
    Case("", "qwen3_coder", "Use <tool_call> or <function=x>.", "Use <tool_call> or <function=x>."),
    Case("", "glm45",
         "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>3</arg_value>\n</tool_call>", None,
         calls=(("get_weather", '{"city": "42", "days": 3}'),), options={"texts": TEXTS}),
    Case("glm45", "glm45",
         "<think>Hm.</think>\nOk.\n<tool_call>write<arg_key>path</arg_key><arg_value> a\n</arg_value>"
         "<arg_key>n</arg_key><arg_value>[1, 2]</arg_value></tool_call><tool_call>now\n</tool_call>", "Ok.", "Hm.",
         (("write", '{"path": " a\\n", "n": [1, 2]}'), ("now", "{}")), {"texts": TEXTS}),
    Case("", "glm45", "<tool_call>is a tag</tool_call>", "<tool_call>is a tag</tool_call>"),
    Case("muse", "muse",  # behind a prompt that ends with <|start|>assistant
         " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>It is 5.<|eot|>", "It is 5.", "Hm."),
    Case("muse", "muse",
         " to=self<|message|>Hm.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
         '<atem:invoke name="get_weather">\n<atem:parameter name="city">42</atem:parameter>\n'
         '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>', None, "Hm.",
         (("get_weather", '{"city": "42", "days": 3}'),), {"texts": TEXTS}),
    Case("muse", "muse", " to=user<|message|>to=you: <b>hi</b>", "to=you: <b>hi</b>"),
    Case("muse", "", " to=user<|message|>Yes.<|eom|>", "Yes."),
    Case("inkling", "inkling",  # behind a prompt that ends with <|message_model|>
         "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Ok.<|end_message|><|message_model|>"
         f'get_weather<|content_invoke_tool_json|>{{"name":"get_weather","args":{WEATHER}}}<|end_message|>'
         f'<|message_model|>get_time<|content_invoke_tool_json|>{{"name":"get_time","args":{TIME}}}<|end_message|>'
         "<|content_model_end_sampling|>", "Ok.", "Hm.", (("get_weather", WEATHER), ("get_time", TIME))),
    Case("inkling", "inkling", 'now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>', None,
         calls=(("now", "{}"),)),
    Case("inkling", "inkling", "It is late.", "It is late."),
    Case("inkling", "inkling", "<|content_text|>It is " + "very " * 60 + "late.<|end_message|>",
         "It is " + "very " * 60 + "late."),
    Case("inkling", "inkling", "no mark " * 40 + "here", "no mark " * 40 + "here"),
    Case("inkling", "inkling", "<|content_text|>a<|end_message|><|message_model|>b<|content_text|>c", "abc"),
    Case("solar_open2", "solar_open2",
         "<|think:start|>Hm.<|think:end|>Ok.<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>42"
         "<|tool_arg:end|>\n<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n"
         "<|tool_call:start|>now\n<|tool_call:end|>", "Ok.", "Hm.",
         (("get_weather", '{"city": "42", "days": 3}'), ("now", "{}")), {"texts": TEXTS}),
    Case("solar_open2", "solar_open2",  # a call before the thoughts end
         "<|think:start|>Hm.<|tool_call:start|>write\n<|tool_arg:start|>path<|tool_arg:value|>a\n<|tool_arg:end|>\n"
         "<|tool_arg:start|>n<|tool_arg:value|>[1]<|tool_arg:end|>\n<|tool_call:end|>", None, "Hm.",
         (("write", '{"path": "a\\n", "n": [1]}'),), {"texts": TEXTS}),
    Case("", "mimo", "<tool_call>\n<function=write>\n<parameter=text>\n a\n</parameter>\n<parameter=n>1</parameter>\n"
         "</function>\n</tool_call>", None,
         calls=(("write", '{"text": "\\n a\\n", "n": 1}'),), options={"texts": TEXTS}),
    Case("", "mimo", "<tool_call>\n<function=write>\n<parameter=text> a\n<parameter=n>1\n</function>\n</tool_call>",
         None, calls=(("write", '{"text": " a", "n": 1}'),), options={"texts": TEXTS}),
    # a section that was not opened, or was opened wrongly
    Case("", "deepseek_v4", 'So. <｜DSML｜tool>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool>',
         "So.", calls=(("now", "{}"),)),
    Case("", "deepseek_v4", '<｜DSML｜toolcalls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
         "</｜DSML｜tool_calls>", None, calls=(("now", "{}"),)),
    Case("", "deepseek_v32", 'So.\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "So.",
         calls=(("now", "{}"),)),
    # elements of one name
    Case("", "minimax_m3", ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="tag">]<]minimax[>[<of>'
         "]<]minimax[>[<t>a]<]minimax[>[</t>]<]minimax[>[<t>2]<]minimax[>[</t>]<]minimax[>[</of>]<]minimax[>[</invoke>\n"
         "]<]minimax[>[</tool_call>", None, calls=(("tag", '{"of": {"t":["a",2]}}'),)),
    Case("gemma4", "", "thought\nHm.<channel|>Yes.", "Yes.", "Hm."),
    Case("gemma4", "", "thoughtful answers", "thoughtful answers"),
    # texts without their marks, the word before a name left out
    Case("", "gemma4", '<|tool_call>:get_weather{city:8001,days:3,of:{city:1}}<tool_call|><|tool_call>call:write{'
         'path:true,note:null,text:null}<tool_call|>', None,
         calls=(("get_weather", '{"city":"8001","days":3,"of":{"city":1}}'),
                ("write", '{"path":"true","note":null,"text":"null"}')), options={"texts": TEXTS}),
]  # fmt: skip

_A = "<|channel|>analysis<|message|>"
_S = "<|start|>assistant"
HARMONY = [
    Case("gpt_oss", "", f"{_A}User greets.<|end|>{_S}<|channel|>final<|message|>Hello!", "Hello!", "User greets."),
    Case("gpt_oss", "gpt_oss",
         f"{_A}Weather.<|end|>{_S}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"
         "<|call|>", None, "Weather.", (("get_weather", WEATHER),)),
    Case("gpt_oss", "harmony",
         f"{_A}One.<|end|>{_S}{_A}Two.<|end|>{_S}<|channel|>commentary<|message|>I will call.<|end|>"
         f"{_S} to=functions.a<|channel|>commentary json<|message|>{{}}", "I will call.", "One.\nTwo.", (("a", "{}"),)),
    Case("", "gpt_oss", " to=functions.a<|channel|>commentary<|message|><|call|>", None, calls=(("a", "{}"),)),
    Case("", "gpt_oss", " to=functions.a<|channel|>commentary<|message|>", None, calls=(("a", "{}"),)),
    Case("gpt_oss", "gpt_oss",
         '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x": "y', None, calls=(("a", '{"x": "y'),)),
    Case("gpt_oss", "gpt_oss", f"{_A}Hm.<|end|>{_S}<|channel|>analysis to=functions.a code<|message|>{{}}<|call|>",
         None, "Hm.", (("a", "{}"),)),
    Case("gpt_oss", "gpt_oss", "<|channel|>commentary\u2013\u2013commentary to=functions.a<|channel|>commentary "
         "<|constrain|><|constrain|>json<|message|>{}<|call|>", None, calls=(("a", "{}"),)),
    Case("gpt_oss", "gpt_oss", '<|channel|>commentary to=functions.a json<|message|>{"x": "1\n2"}<|call|>', None,
         calls=(("a", '{"x": "1\\n2"}'),)),
    Case("gpt_oss", "gpt_oss", '<|channel|>commentary to=functions.a code<|message|>print("1\n2")<|call|>', None,
         calls=(("a", 'print("1\n2")'),)),
    Case("gpt_oss", "gpt_oss", f"<|channel|>commentary<|message|>I look.<|end|>{_S}<|channel|>final<|message|>It is.",
         "I look.\nIt is."),
    Case("gpt_oss", "", "<|channel|>final<|message|>Half an ans", "Half an ans"),
    Case("gpt_oss", "", "<|channel|>anal", ""),
    Case("gpt_oss", "", "Plain text.", "Plain text."),
    Case("gpt_oss", "", "<|channel|>commentary to=functions.a<|message|>{}", "{}"),
]  # fmt: skip

NEMOTRON = [
    Case("", "command_a", '<|START_ACTION|>{"name": "a", "arguments": {"x": 1}}<|END_ACTION|>', None,
         calls=(("a", '{"x": 1}'),)),
    Case("", "nemotron_deci", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {WEATHER}}}]</TOOLCALL>', None,
         calls=(("get_weather", WEATHER),)),
    Case("", "nemotron_deci", "<TOOLCALL>[]</TOOLCALL> None fits.", " None fits."),
]  # fmt: skip

# What a format has another way for, and models write all the same.
VARIANTS = [
    Case("gemma4", "", "<|channel>Hm.<channel|>So.", "So.", "Hm."),
    Case("gemma4", "", "<|channel>thoughtful<channel|>So.", "So.", "ful"),
    Case("", "dots", '<dots_function_call>{"name": "a", "arguments": {"x": "}"}}</dots_function_call> So.', "So.",
         calls=(("a", '{"x": "}"}'),)),
    Case("", "qwen3_coder", '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
         "<tool_call>\n<function=b>\n</function>\n</tool_call>", None, calls=(("a", '{"x": 1}'), ("b", "{}"))),
    Case("", "qwen3_coder", "<tool_call>\n{x}\n</tool_call>", "<tool_call>\n{x}\n</tool_call>"),
    Case("", "qwen3_coder", f"<tool_call>\n<function=a>\n{WEATHER}\n</function>\n</tool_call>", None,
         calls=(("a", WEATHER),)),
    Case("", "qwen3_coder", '<tool_call>\n<function=a>{"x": 1</function>\n</tool_call>So.', "So.",
         calls=(("a", '{"x": 1'),)),
    Case("", "deepseek_v32",
         f'<｜DSML｜function_calls>\n  <｜DSML｜invoke name="a">\n  {WEATHER}\n  </｜DSML｜invoke>\n'
         f'<｜DSML｜invoke name="b">{TIME}</｜DSML｜invoke>\n</｜DSML｜function_calls>', None,
         calls=(("a", WEATHER), ("b", TIME))),
    Case("", "glm47", '<tool_call>{"name": "a", "arguments": {}}</tool_call>So.', "So.", calls=(("a", "{}"),)),
    Case("", "k2_horizon", '<ifm|tool_calls><ifm|tool_call>{"name": "a", "arguments": {}}</ifm|tool_call>\n'
         "<ifm|tool_call>b<ifm|arg_key>x"
         "</ifm|arg_key><ifm|arg_value>1</ifm|arg_value></ifm|tool_call></ifm|tool_calls>", None,
         calls=(("a", "{}"), ("b", '{"x": 1}'))),
    Case("", "xlam", 'So.\n```json\n[{"name": "a", "arguments": {}}]\n```\nYes.', "So.\n\nYes.",
         calls=(("a", "{}"),)),
    Case("", "xlam", '<tool_call>[{"name": "a", "arguments": {}}]</tool_call>', None, calls=(("a", "{}"),)),
    Case("", "granite", '<tool_call>[{"name": "a", "arguments": {}}]</tool_call>', None, calls=(("a", "{}"),)),
]  # fmt: skip

CASES = [*HERMES, *THINK, *MISTRAL, *LLAMA, *DEEPSEEK, *KIMI, *MARKUP, *HARMONY, *NEMOTRON, *VARIANTS]
