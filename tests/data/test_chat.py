import pytest

import directories
from spillway.data.chat import encode_chat
from spillway.data.records import Record, as_record
from spillway.spec.errors import DataError

LLAMA3 = "{% for m in messages %}<|im_start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
# Like Qwen3: reasoning stands before the last answer only, and is dropped from earlier ones.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "\n{% endfor %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.get('reasoning_content') %}<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] or '' }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>{{ c['function']['name'] }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What was reasoned before the user's last words is dropped, so the first messages alone are rendered otherwise.
TOOLS_LATE = TOOLS.replace(
    "m.get('reasoning_content')",
    "m.get('reasoning_content') and not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list",
)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def conversation(*contents: str) -> Record:
    return as_record(directories.chat(*contents), "chats.jsonl:7")


def trained_text(record: Record, template: str | None) -> list[str]:
    tokenizer = directories.make_tokenizer(template)
    ids, trained = encode_chat(record, tokenizer)
    runs, current = [], []
    for token, mark in zip([*ids, 0], [*trained, False], strict=True):
        if mark:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


@pytest.mark.parametrize("template", [directories.CHATML, LLAMA3, DROPS_REASONING, MARKED])
def test_the_words_of_the_assistant_and_the_end_of_its_turn_are_trained(template: str) -> None:
    record = conversation("Where does it go?", "Over the spillway.", "And then?", " Down the river.")
    first, second = trained_text(record, template)
    assert first == "Over the spillway.<|im_end|>"
    assert second.strip() == "Down the river.<|im_end|>"


def test_an_answer_that_repeats_the_question_is_still_told_apart() -> None:
    assert trained_text(conversation("same", "same"), directories.CHATML) == ["same<|im_end|>"]


def test_only_the_completion_of_a_conversation_is_trained() -> None:
    history = directories.chat("a", "first answer", "b", "second answer")["messages"]
    record = as_record({"prompt": history[:3], "completion": history[3:]}, "x:1")
    assert trained_text(record, directories.CHATML) == ["second answer<|im_end|>"]
    assert trained_text(record, MARKED) == ["second answer<|im_end|>"]


@pytest.mark.parametrize("template", [NO_END, MARKED_WITHOUT_END])
def test_a_template_that_never_trains_the_end_of_a_turn_is_refused(template: str) -> None:
    with pytest.raises(DataError, match=r"chats.jsonl:7: the token that ends an assistant turn would not be trained"):
        trained_text(conversation("a", "b"), template)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="the tokenizer has none"):
        trained_text(conversation("a", "b"), None)


def test_a_template_that_raises_is_reported_with_its_reason() -> None:
    with pytest.raises(DataError, match="refuses this conversation: no such role"):
        trained_text(conversation("a", "b"), "{{ raise_exception('no such role') }}")


def with_tools() -> Record:
    """Turns that call a tool, with words and without, and an answer."""
    call = {"type": "function", "function": {"name": "level", "arguments": {}}}
    turns = [
        {"role": "user", "content": "How high is it?"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "Who knows.", "tool_calls": [call]},
        {"role": "tool", "content": "three metres"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "four metres"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "It rose."},
    ]
    return as_record({"messages": turns}, "x:1")


@pytest.mark.parametrize(("template", "reasoned"), ((TOOLS, "<think>Who knows.</think>"), (TOOLS_LATE, "")))
def test_calls_of_tools_are_trained_and_what_is_reasoned(template: str, reasoned: str) -> None:
    words, bare, answer = trained_text(with_tools(), template)
    assert words == f"{reasoned}Looking.<tool_call>level</tool_call><|im_end|>"
    assert bare == "<tool_call>level</tool_call><|im_end|>"
    assert answer == "<think>It rose.</think>Four.<|im_end|>"


def test_a_template_that_leaves_tools_out_is_refused() -> None:
    with pytest.raises(DataError, match="leaves out the tool calls of message 2"):
        trained_text(with_tools(), directories.CHATML)
