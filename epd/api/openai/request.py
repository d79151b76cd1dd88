"""What a client of OpenAI's completions may send: of chat, and of plain ones.

Nothing is ignored: a parameter is read, or it cannot change the answer, or it is harmless at the
value that was sent, or it is refused by name.  A server that drops what it does not read gives
answers that nobody asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from epd.api.asked.offered_tools import Choice, Tools
from epd.api.asked.parameters import (
    Metadata,
    NoRepeatNgram,
    NumLogprobs,
    ServiceTier,
    Spoken,
    TokenId,
    Tokens,
)
from epd.api.asked.staged import EcParams, KvParams
from epd.api.asked.structured import Choices, JsonSchema, ResponseFormat, StructuredOutputs
from epd.api.asked.template_flags import Effort
from epd.api.http.shapes import JsonValue, NotRead, Shape
from epd.api.openai.messages_field import Messages
from epd.api.openai.video_field import MediaIo, Processing

NamedIds = Annotated[list[TokenId], Meta(max_length=128)]  # whose log-probabilities are asked for
BEAMS = "there is no beam search; for several answers use n"
TEXT = "this server makes text only"
SPECIAL = "they are added to plain prompts, and chat templates write their own"
DOCUMENTS = "put them into messages"
TEMPLATE = "a plain completion has no chat template"
REFUSED = {
    "audio": NotRead(TEXT),
    "best_of": NotRead("use n and choose yourself", (1,)),
    "function_call": NotRead("use tools and tool_choice", ("none",)),
    "functions": NotRead("use tools", ([],)),
    "length_penalty": NotRead(BEAMS, (1, 1.0)),
    "modalities": NotRead(TEXT, (["text"],)),
    "prediction": NotRead("predicted output is not used"),
    "spaces_between_special_tokens": NotRead(
        "tokens are joined as the tokenizer joins them", (True,)
    ),
    "suffix": NotRead("there is no insertion mode"),
    "use_beam_search": NotRead(BEAMS, (False,)),
    "web_search_options": NotRead("this server does not search"),
}


class StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # events are never padded


class Completions(Spoken):
    """Of chat and of plain completions."""

    model: str | None = None
    logprob_token_ids: NamedIds | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream_options: StreamOptions | None = None
    vllm_xargs: NoRepeatNgram | None = None  # the only thing that its clients send there
    ec_transfer_params: dict[str, EcParams] | None = None
    kv_transfer_params: KvParams | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Without effect: they name, tag or cache, or are hints to other models.
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    refused = REFUSED


class ChatRequest(Completions, kw_only=True):
    messages: Messages
    max_completion_tokens: Tokens | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    tools: Tools = field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, JsonValue] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    include_reasoning: bool = True
    media_io_kwargs: MediaIo | None = None
    mm_processor_kwargs: Processing | None = None
    refused = REFUSED | {
        "add_special_tokens": NotRead(SPECIAL, (False,)),
        "documents": NotRead(DOCUMENTS, ([],)),
        "echo": NotRead("an answer of a conversation stands alone", (False,)),
    }


class CompletionRequest(Completions, kw_only=True):
    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)
        ]
    )
    echo: bool = False
    logprobs: NumLogprobs | None = None
    refused = REFUSED | {
        "add_generation_prompt": NotRead(TEMPLATE),
        "add_special_tokens": NotRead(SPECIAL, (True,)),
        "continue_final_message": NotRead("a plain completion continues its prompt"),
        "documents": NotRead(DOCUMENTS),
        "include_reasoning": NotRead("a plain completion has its reasoning in its text", (True,)),
        "reasoning_effort": NotRead(TEMPLATE),
    }
