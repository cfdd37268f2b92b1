"""Conversations to tokens, with the mask of what is trained: what the assistant says, thinks and calls, and the token
that ends its turn.

Where a template marks generations ({% generation %}) its own mask is used. Otherwise the words of each assistant turn
are found by rendering the conversation once more with a sentinel in their place: what comes before and after the
sentinel must surround the words in the true rendering. This also holds for templates that render earlier turns
differently once later ones follow (reasoning that is dropped), where rendering prefixes would fail.
"""

from typing import Any

from spillway.data.records import Record
from spillway.spec.errors import DataError

_SENTINEL = "SPILLWAY7f3a9c"
_REASONING = ("reasoning_content", "reasoning", "thinking")


def encode_chat(record: Record, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids and which are trained. Raises DataError when no assistant token is, or no end of turn is."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{record.where}: a conversation or an instruction needs a chat template and the tokenizer has none: use "
            f"an instruction-tuned model's tokenizer, add chat_template.jinja to the model directory, or give 'prompt' "
            f"and 'completion'"
        )
    try:
        if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
            ids, trained = _by_markers(record, tokenizer)
        else:
            ids, trained = _by_sentinel(record, tokenizer)
    except DataError:
        raise
    except Exception as error:  # templates raise what they like
        raise DataError(f"{record.where}: the chat template refuses this conversation: {error}") from error
    if not any(trained):
        raise DataError(f"{record.where}: no token would be trained: the assistant's turns are empty after templating")
    _require_end_of_turn(record, tokenizer, ids, trained)
    return ids, trained


def _render(record: Record, tokenizer: Any, messages: list[dict[str, Any]], **more: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, tools=list(record.tools) or None, **more))


def _by_markers(record: Record, tokenizer: Any) -> tuple[list[int], list[bool]]:
    found = tokenizer.apply_chat_template(
        list(record.messages),
        tools=list(record.tools) or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    trained = [bool(mark) for mark in found["assistant_masks"]]
    if record.trained_from:
        skipped = sum(message["role"] == "assistant" for message in record.messages[: record.trained_from])
        trained = _without_first_runs(trained, skipped)
    return list(found["input_ids"]), trained


def _without_first_runs(trained: list[bool], count: int) -> list[bool]:
    result, runs = [], 0
    for index, mark in enumerate(trained):
        runs += mark and (index == 0 or not trained[index - 1])
        result.append(mark and runs > count)
    return result


def _by_sentinel(record: Record, tokenizer: Any) -> tuple[list[int], list[bool]]:
    whole = _render(record, tokenizer, list(record.messages))
    spans = [
        _span_of_turn(record, tokenizer, whole, index)
        for index, message in enumerate(record.messages)
        if message["role"] == "assistant" and index >= record.trained_from
    ]
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    trained = [False] * len(ids)
    for begin, end in spans:
        inside = [place for place, (start, stop) in enumerate(offsets) if start < end and stop > begin]
        for place in inside:
            trained[place] = True
        after = inside[-1] + 1 if inside else _first_from(offsets, end)
        stop_at = _end_of_turn(ids, after, whole, offsets, tokenizer)
        if stop_at is not None:
            for place in range(after, stop_at + 1):
                trained[place] = True
    return ids, trained


def _first_from(offsets: list[tuple[int, int]], position: int) -> int:
    return next((place for place, (start, _) in enumerate(offsets) if start >= position), len(offsets))


def _span_of_turn(record: Record, tokenizer: Any, whole: str, index: int) -> tuple[int, int]:
    if any(record.messages[index].get(name) for name in ("tool_calls", *_REASONING)):
        return _span_of_more(record, tokenizer, whole, index)
    messages = [dict(message) for message in record.messages]
    messages[index]["content"] = _SENTINEL
    before, is_found, after = _render(record, tokenizer, messages).partition(_SENTINEL)
    return _between(record, whole, before, after if is_found else None, index)


def _span_of_more(record: Record, tokenizer: Any, whole: str, index: int) -> tuple[int, int]:
    """Of a turn that also calls tools or reasons: from what asks the model to speak to what a turn of words alone is
    followed by."""
    messages = [dict(message) for message in record.messages]
    turn = messages[index]
    words = {name: value for name, value in turn.items() if name not in ("tool_calls", *_REASONING)}
    messages[index] = {**words, "content": turn.get("content") or ""}
    if turn.get("tool_calls") and _render(record, tokenizer, messages) == whole:
        raise DataError(
            f"{record.where}: the chat template leaves out the tool calls of message {index + 1}: use one that knows "
            f"tools"
        )
    messages[index] = {**words, "content": _SENTINEL}
    _, is_found, after = _render(record, tokenizer, messages).partition(_SENTINEL)
    before = _render(record, tokenizer, messages[:index], add_generation_prompt=True)
    if not whole.startswith(before):  # earlier turns are rendered otherwise once later ones follow
        messages[index] = {**turn, **{name: _SENTINEL for name in _REASONING if name in turn}, "content": _SENTINEL}
        before = _render(record, tokenizer, messages).partition(_SENTINEL)[0]
    return _between(record, whole, before, after if is_found else None, index)


def _between(record: Record, whole: str, before: str, after: str | None, index: int) -> tuple[int, int]:
    """Where a turn begins and ends in the whole, by what surrounds it. Raises DataError where that does not."""
    end = len(whole) - len(after or "")
    if after is None or not whole.startswith(before) or not whole.endswith(after) or end < len(before):
        raise DataError(
            f"{record.where}: the chat template renders message {index + 1} so that its words cannot be found; use a "
            f"template with {{% generation %}} markers"
        )
    return len(before), end


def _end_of_turn(ids: list[int], start: int, whole: str, offsets: list[tuple[int, int]], tokenizer: Any) -> int | None:
    """The special token right after a turn's words, white space between allowed; None if there is none."""
    special = special_ids(tokenizer)
    for place in range(start, len(ids)):
        if ids[place] in special:
            return place
        begin, end = offsets[place]
        if whole[begin:end].strip():
            return None
    return None


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that structure text rather than spell it."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def _require_end_of_turn(record: Record, tokenizer: Any, ids: list[int], trained: list[bool]) -> None:
    special = special_ids(tokenizer)
    last = max(place for place, mark in enumerate(trained) if mark)
    tail = last
    while tail > 0 and trained[tail] and not str(tokenizer.decode([ids[tail]])).strip():
        tail -= 1
    if ids[tail] not in special:
        raise DataError(
            f"{record.where}: the token that ends an assistant turn would not be trained, so the model would never "
            f"learn to stop: the chat template must end turns with a special token (inside its generation markers, if "
            f"it has any)"
        )
