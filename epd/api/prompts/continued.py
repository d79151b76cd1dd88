"""An answer that is begun already: the last message of a conversation, which goes on.

Chat's `continue_final_message`, and an assistant's message at the end of Anthropic's Messages.  The
prompt ends where the text of that message ends: as in transformers, a mark is put behind the text,
and what is rendered is cut at the mark.  Only what is new is answered.  A grammar begins with the
first new token, and stop strings are looked for from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd.api.asked.calls.registry import form_named
from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.template_flags import CONTINUED
from epd.api.asked.tools import ToolUse
from epd.api.http.errors import ApiError, bad_request

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # that of transformers: templates see the same


def check_continued(messages: Sequence[ChatMessage], use: ToolUse | None) -> None:
    """Raises ApiError 400 for a conversation whose last message cannot go on.

    `use`: the tools that its answer may call.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise _refused(f"the last message is of role {last['role']}, not of the assistant")
    if "tool_calls" in last:
        raise _refused("the last message has tool calls, behind which no text can go on")
    said = begun(messages)
    if use is not None and (form := form_named(use.form)).is_within(said):
        raise _refused(f"the last message ends within a tool call; end it ahead of {form.open}")


def begun(messages: Sequence[ChatMessage]) -> str:
    """The beginning of the answer."""
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def marked(message: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """The last message, as its template takes it, with the mark; and the text ahead of the mark."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    assert isinstance(content, list)  # of parts
    *parts, last = content
    text = str(last["text"])
    return {**message, "content": [*parts, {**last, "text": text + _MARK}]}, text


def cut(rendered: str, text: str) -> str:
    """Up to the mark behind `text`, without white space where the template trims that.

    Raises ApiError 400.
    """
    mark = _MARK.strip()
    if text.strip() not in rendered or mark not in rendered:
        raise _refused("the model's chat template does not show the last message as it is")
    ahead, _, behind = rendered.rpartition(mark)
    return ahead if behind.startswith(_MARK.removeprefix(mark)) else ahead.rstrip()


def _refused(why: str) -> ApiError:
    return bad_request(f"{CONTINUED} cannot be kept: {why}", CONTINUED)
