"""A request's input to the chat template beside the conversation: flags, and how much reasoning.

A flag is a variable of the template (`chat_template_kwargs`).  One that the template does not read
would be dropped in silence, so it is refused, unless it turns something off that is not there.
`add_generation_prompt` and `continue_final_message` set where the text ends, as in transformers.
`reasoning_effort` goes to a template that reads it, and where there is only a switch for reasoning
it turns this on or off.  Without either it is a hint to other models, which agents always send.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from epd.api.http.errors import bad_request
from epd.frontend import JsonObject

KWARGS, EFFORT = "chat_template_kwargs", "reasoning_effort"
ANSWERED, CONTINUED = "add_generation_prompt", "continue_final_message"
OWN = ("messages", "tools", "documents", ANSWERED, CONTINUED)  # said elsewhere in the request
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class TemplateFlags:
    """As asked; checked against a template when there is one."""

    variables: Mapping[str, object] = field(default_factory=dict)
    effort: str = ""
    is_answered: bool = True  # the text ends where an answer begins
    is_continued: bool = False  # it ends within the last message, an answer, which goes on

    def for_template(self, names: Collection[str]) -> JsonObject:
        """The variables for a template that reads `names`.  Raises ApiError 400."""
        for name, value in self.variables.items():
            if name not in names and value not in (None, False):
                path = f"{KWARGS}.{name[:80]}"
                message = f"{path} is not read by the model's chat template; leave it out"
                raise bad_request(message, path, "unsupported_parameter")
        return self._from_effort(names) | dict(self.variables)

    def _from_effort(self, names: Collection[str]) -> JsonObject:
        switches = [name for name in SWITCHES if name in names]
        if not self.effort:
            return {}
        read: JsonObject = dict.fromkeys(switches, self.effort != "none")
        return read | ({EFFORT: self.effort} if EFFORT in names else {})


NO_FLAGS = TemplateFlags()


def read_flags(
    variables: JsonObject, effort: str | None, is_answered: bool | None, *, is_continued: bool
) -> TemplateFlags:
    """Raises ApiError 400."""
    for name in OWN:
        if name in variables:
            path = f"{KWARGS}.{name}"
            raise bad_request(f"{path} is not taken: the request itself has it", path)
    if is_continued and is_answered:
        message = f"{CONTINUED} needs {ANSWERED}: false, or none: no new answer begins"
        raise bad_request(message, CONTINUED)
    if is_answered is None:
        is_answered = not is_continued
    return TemplateFlags(variables, effort or "", is_answered, is_continued)
