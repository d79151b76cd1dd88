"""A validated request, of either kind: what was asked, and what follows from it for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import field

from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.parameters import NoRepeatNgram, Spoken
from epd.api.asked.staged import WHOLE, Staged
from epd.api.asked.structured import Constraint
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.asked.tools import Tool, ToolUse
from epd.api.http.errors import ApiError, bad_request
from epd.api.http.shapes import Facts
from epd.config import Limits
from epd.frontend import NO_ADAPTER, Adapter, JsonObject
from epd.messages import NoRepeat, SamplingParams

SEED_MASK = 2**63 - 1
WHOLE_TOKENS_PER_WORD = 16  # of an answer that is not streamed: nobody reads it as it grows


class ModelFacts(Protocol):
    """The model's data for validation."""

    model_name: str
    served_names: tuple[str, ...]  # this one, and others that requests may give
    adapters: Mapping[str, Adapter]  # by their names, which requests may give, too
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    reasoning_parser: str  # empty: reasoning is text like any
    call_form: str  # of `calls.registry.FORMS`; empty: its template writes calls in none of these
    defaults: Mapping[str, object]  # of fields of `Asked`, as the model's publisher wants them


def facts_of(model: ModelFacts, limits: Limits) -> Facts:
    """What bounds a request."""
    return Facts(model.vocab_size - 1, limits.max_choices, limits.max_pixels)


def _as_it_is(error: ApiError) -> ApiError:
    return error


class Asked(Spoken):
    """One validated request of any API: its parameters, and what was made of the rest of it."""

    messages: list[ChatMessage] | None = None  # chat
    prompts: tuple[str | list[int], ...] = ()  # completion: each has `n` choices
    tells_prompt: bool = False  # completion (`echo`): the prompt stands ahead of the answer
    no_tokens: bool = False  # the prompt alone is answered
    num_prompt_logprobs: int = -1  # as SamplingParams; -1 if they are only echoed
    default_max_tokens: int | None = None  # unlike max_tokens, it gives way to the context
    max_context: int = 0  # of the model; 0: where it ends an answer ends as "length"
    num_logprobs: int = -1  # as SamplingParams
    logprob_token_ids: tuple[int, ...] = ()  # likewise
    include_reasoning: bool = True  # chat, where it stands apart from the text
    is_timed: bool = False  # the wait for each token is bounded: each is sent at once
    include_usage: bool = False
    continuous_usage: bool = False
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None  # chat
    template_flags: TemplateFlags = NO_FLAGS  # chat
    staged: Staged = WHOLE
    adapter: Adapter = NO_ADAPTER
    told: Callable[[ApiError], ApiError] = _as_it_is  # names fields as the client's API does
    echo: JsonObject = field(default_factory=dict)  # what that API's answers repeat of it

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def num_choices(self) -> int:
        return self.n * (len(self.prompts) or 1)

    @property
    def num_scored(self) -> int:
        """How the prompt's tokens are scored, for both fields that show it."""
        return max(self.num_prompt_logprobs, self.num_logprobs if self.tells_prompt else -1)

    def sampling(
        self,
        index: int,
        seed: int,
        max_tokens: int,
        model: ModelFacts,
        grammar: str = "",
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Of choice `index` of a prompt: choices differ in their seed only."""
        is_read_as_it_grows = self.stream or self.stops or self.is_timed
        return SamplingParams(
            **{name: getattr(self, name) for name in _AS_IT_IS},
            max_tokens=max_tokens,
            seed=(seed + index) & SEED_MASK,
            stop_token_ids=self.all_stop_token_ids(model),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            num_prompt_logprobs=self.num_scored,
            grammar=grammar,
            bad_words=bad_words,
            no_repeat_ngram=_no_repeat(self.no_repeat_ngram),
            tokens_per_word=1 if is_read_as_it_grows else WHOLE_TOKENS_PER_WORD,
        )

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.tool_use.tools if self.tool_use is not None else ()

    @property
    def shows_marks(self) -> bool:
        """The marks around calls are special tokens in some vocabularies."""
        return not self.skip_special_tokens or self.tool_use is not None

    @property
    def grammar_source(self) -> Constraint | ToolUse | None:
        """What the answer is held to; calls that are free are not."""
        if self.tool_use is not None and self.tool_use.is_shaped:
            return self.tool_use
        return self.constraint

    def all_stop_token_ids(self, model: ModelFacts) -> tuple[int, ...]:
        """The client's and, unless it ignores them, the model's."""
        return self.stop_token_ids if self.ignore_eos else model.eos_token_ids + self.stop_token_ids

    def max_new_tokens(self, num_prompt_tokens: int, model: ModelFacts) -> int:
        """How many tokens this prompt leaves room for.  Raises ApiError 400."""
        room = model.max_context - num_prompt_tokens
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if wanted > room:
            param = "prompt" if self.messages is None else "messages"
            asks = "at least 1" if self.max_tokens is None else f"max_tokens {wanted}"
            message = (
                f"the context holds {model.max_context} tokens, and this request needs "
                f"{num_prompt_tokens + wanted}: {num_prompt_tokens} of the prompt (images "
                f"included) and {asks} to generate. Shorten the prompt or ask for fewer tokens"
            )
            raise bad_request(message, param, "context_length_exceeded")
        most = wanted if self.max_tokens is not None else min(room, self.default_max_tokens or room)
        if self.min_tokens > most:
            message = f"min_tokens {self.min_tokens} is above {most}, which is all that can come"
            raise bad_request(message, "min_tokens", "out_of_range")
        return most

    def check_choice(self, bad_words: tuple[tuple[int, ...], ...], model: ModelFacts) -> None:
        """Raises ApiError 400 where there may be no token left to sample.

        `bad_words`: as token ids; of each the last one is forbidden behind the others.
        """
        if not self.allowed_token_ids:
            return
        forbidden = {word[-1] for word in bad_words if word}
        if (rule := self.no_repeat_ngram) is not None:
            forbidden |= {*self.allowed_token_ids} - {*rule.whitelist_token_ids}
        if self.min_tokens:
            forbidden.update(self.all_stop_token_ids(model))
        if forbidden.issuperset(self.allowed_token_ids):
            message = (
                "bad_words, no_repeat_ngram, or min_tokens with the tokens that end an answer, may "
                "forbid each of allowed_token_ids: allow one more token"
            )
            raise bad_request(message, "allowed_token_ids")


_AS_IT_IS = {*SamplingParams.__struct_fields__} & {*Asked.__struct_fields__}
_AS_IT_IS -= {"bad_words", "logit_bias", "max_tokens", "no_repeat_ngram", "num_prompt_logprobs"}
_AS_IT_IS -= {"seed", "stop_token_ids"}


def _no_repeat(rule: NoRepeatNgram | None) -> NoRepeat | None:
    return None if rule is None else NoRepeat(**msgspec.structs.asdict(rule))
