"""A validated request, of either kind: what was asked, and what follows from it for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from epd.api.asked.chat_message import ChatMessage
from epd.api.asked.staged import WHOLE, Staged
from epd.api.asked.structured import Constraint
from epd.api.asked.template_flags import NO_FLAGS, TemplateFlags
from epd.api.asked.tools import Tool, ToolUse
from epd.api.http.errors import ApiError, bad_request
from epd.messages import SamplingParams

SEED_MASK = 2**63 - 1
WHOLE_TOKENS_PER_WORD = 16  # of an answer that is not streamed: nobody reads it as it grows


class ModelFacts(Protocol):
    """What validation must know of the model."""

    model_name: str
    served_names: tuple[str, ...]  # this one, and others that requests may give
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    reasoning_parser: str  # empty: reasoning is text like any
    defaults: Mapping[str, object]  # of fields of `Asked`, as the model's publisher wants them


def _as_it_is(error: ApiError) -> ApiError:
    return error


@dataclass(slots=True, kw_only=True)
class Asked:
    """One validated request of either kind; fields as in OpenAI's API where names agree."""

    messages: list[ChatMessage] | None = None  # chat
    prompts: tuple[str | list[int], ...] = ()  # completion: each has `n` choices
    tells_prompt: bool = False  # completion (`echo`): the prompt is told ahead of the answer
    no_tokens: bool = False  # the prompt alone is told
    num_prompt_logprobs: int = -1  # as SamplingParams; -1 if they are only echoed
    max_tokens: int | None = None  # None: the model's default, or what the context allows
    default_max_tokens: int | None = None  # unlike max_tokens, it gives way to the context
    max_context: int = 0  # of the model; 0: where it ends an answer is told as "length"
    min_tokens: int = 0
    priority: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None  # the last so many are kept
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    num_logprobs: int = -1  # as SamplingParams
    logprob_token_ids: tuple[int, ...] = ()  # likewise
    return_token_ids: bool = False  # of the prompt, and of what was generated
    return_tokens_as_token_ids: bool = False  # log-probabilities name tokens by their ids
    include_reasoning: bool = True  # chat, where it is told apart from the text
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    is_timed: bool = False  # the wait for each token is bounded: each is told at once
    include_usage: bool = False
    continuous_usage: bool = False
    user: str = ""
    cache_salt: str = ""  # what is computed of its prompt is shared with equal ones only
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None  # chat
    template_flags: TemplateFlags = NO_FLAGS  # chat
    staged: Staged = WHOLE
    told: Callable[[ApiError], ApiError] = _as_it_is  # names fields as the client's API does
    echo: Mapping[str, object] = field(default_factory=dict)  # what that API's answers repeat of it

    @property
    def num_choices(self) -> int:
        return self.n * (len(self.prompts) or 1)

    @property
    def num_scored(self) -> int:
        """How the prompt's tokens are scored, for either way to be told."""
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
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=(seed + index) & SEED_MASK,
            stop_token_ids=self.all_stop_token_ids(model),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_scored,
            min_tokens=self.min_tokens,
            grammar=grammar,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=bad_words,
            priority=self.priority,
            tokens_per_word=1
            if self.stream or self.stop or self.is_timed
            else WHOLE_TOKENS_PER_WORD,
            logprob_token_ids=self.logprob_token_ids,
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

        `bad_words`: as token ids; of each the last one is forbidden once the others were said.
        """
        if not self.allowed_token_ids:
            return
        forbidden = {word[-1] for word in bad_words if word}
        if self.min_tokens:
            forbidden.update(self.all_stop_token_ids(model))
        if forbidden.issuperset(self.allowed_token_ids):
            message = (
                "bad_words, or min_tokens with the tokens that end an answer, may forbid each of "
                "allowed_token_ids: allow one more token"
            )
            raise bad_request(message, "allowed_token_ids")
