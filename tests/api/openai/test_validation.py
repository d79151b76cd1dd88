"""What may be asked: each parameter read, harmless, or refused by name (fault F33)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.asked.asked import SEED_MASK, Asked
from epd.api.asked.structured import Constraint
from epd.api.http.body import parse_object
from epd.api.http.errors import ApiError
from epd.api.http.shapes import names_of
from epd.api.openai.request import ChatRequest, CompletionRequest
from epd.api.openai.validation import read_chat, read_completion
from epd.config import Limits
from epd.messages import NoRepeat
from tests.api.fakes import EOS, FakePreparer

MODEL = FakePreparer()
LIMITS = Limits(max_choices=4)
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = names_of(ChatRequest), names_of(CompletionRequest)


def chat(**fields: Any) -> Asked:
    return read_chat({"messages": HI, **fields}, MODEL, LIMITS)


def completion(**fields: Any) -> Asked:
    return read_completion({"prompt": "hi", **fields}, MODEL, LIMITS)


def refusal(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.param
    return caught.value


def test_defaults_are_openai_s():
    asked = chat()
    sampling = asked.sampling(0, 7, 11, MODEL)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.max_tokens, sampling.seed, sampling.num_logprobs) == (11, 7, -1)
    assert sampling.stop_token_ids == (EOS,)
    assert (asked.n, asked.stream, asked.max_tokens, asked.stop) == (1, False, None, ())


def test_null_is_absence():
    everything = dict.fromkeys(CHAT - {"messages"} | {"anything"})
    assert chat(**everything) == chat()
    assert completion(**dict.fromkeys(COMPLETION - {"prompt"})) == completion()


def test_every_parameter_reaches_the_sampler():
    asked = chat(
        max_tokens=5, min_tokens=2, priority=-3,
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=9,
        frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.5, logit_bias={"7": -100},
        logprobs=True, top_logprobs=2, prompt_logprobs=4, ignore_eos=True,
        allowed_token_ids=[6, 7], logprob_token_ids=[9.0, 8, 9],
        no_repeat_ngram={"ngram_size": 3, "whitelist_token_ids": [6]},
    )  # fmt: skip
    sampling = asked.sampling(1, asked.seed, 5, MODEL, "g", ((8,),))
    assert msgspec.structs.astuple(sampling) == (
        5, 0.0, 0.5, 3, 0.1, 10, (), 1.0, -1.0, 1.5, ((7, -100.0),), 2, 4, 2, (6, 7), ((8,),),
        NoRepeat(ngram_size=3, window_size=100, whitelist_token_ids=(6,)), "g", -3, 16, (9, 8),
    )  # fmt: skip


def test_top_k_off_and_above_the_vocabulary():
    assert chat(top_k=-1).top_k == 0
    assert chat(top_k=2**31 - 1).top_k == MODEL.vocab_size


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_int64_seed_is_a_63_bit_seed(seed: int):
    sampling = chat(seed=seed).sampling(3, seed, 1, MODEL)
    assert 0 <= sampling.seed <= SEED_MASK


@pytest.mark.parametrize("value", [0, -1, -(10**30)])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_f33_token_limit_below_one_names_the_field(name: str, value: int):
    error = refusal(chat, **{name: value})
    assert error.param == name
    assert name in error.message and "at least 1" in error.message


def test_f33_two_names_of_one_limit():
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"


OUT_OF_RANGE = [
    ("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1), ("top_k", -2),
    ("min_p", -1), ("min_p", 1.5), ("frequency_penalty", 2.5), ("presence_penalty", -2.5),
    ("repetition_penalty", 0), ("n", 0), ("n", 5), ("seed", 2**63), ("min_tokens", -1),
    ("priority", 101), ("priority", 0.5),
    ("logit_bias", {"0": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(0x110000): 1}), ("stop", ["a"] * 17), ("stop", ""), ("stop", "a" * 1025),
    ("temperature", 10**400), ("seed", 10**400),
]  # fmt: skip
WRONG_TYPE = [
    ("temperature", "1"), ("temperature", True), ("max_tokens", 1.5), ("max_tokens", True),
    ("max_tokens", "5"), ("n", "1"), ("stream", 1), ("stop", 3), ("stop", [3]), ("user", 3),
    ("logit_bias", []), ("metadata", "x"), ("ignore_eos", "yes"), ("model", 3), ("seed", 1.5),
    ("response_format", "text"), ("logit_bias", {"1": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*OUT_OF_RANGE, *WRONG_TYPE])
def test_bad_values_are_refused_by_name(name: str, value: Any):
    for read in (chat, completion) if name in COMPLETION else (chat,):
        error = refusal(read, **{name: value})
        assert error.param.split("[")[0].split(".")[0] == name
        assert name in error.message


@pytest.mark.parametrize(
    ("read", "name"),
    [(chat, name) for name in sorted(ChatRequest.refused)]
    + [(completion, name) for name in sorted(CompletionRequest.refused)],
)
def test_unsupported_parameters_are_refused_by_name(read: Any, name: str):
    error = refusal(read, **{name: {"some": "thing"}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert name in error.message


@pytest.mark.parametrize("name", ["temprature", "Temperature", "foo", " n"])
def test_unknown_parameters_are_refused_by_name(name: str):
    with pytest.raises(ApiError) as caught:
        chat(**{name: 1})
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
    assert f"'{name}'" in caught.value.message


@pytest.mark.parametrize("name", ["messages", "max_completion_tokens", "top_logprobs"])
def test_chat_parameters_are_unknown_to_completions(name: str):
    assert refusal(completion, **{name: 1}).param == name


@pytest.mark.parametrize(
    ("read", "name", "values"),
    [(chat, name, harmless) for name, (_, harmless) in ChatRequest.refused.items()]
    + [(completion, name, harmless) for name, (_, harmless) in CompletionRequest.refused.items()],
)
def test_harmless_values_are_accepted_and_no_others(read: Any, name: str, values: tuple[Any, ...]):
    for value in values:
        assert read(**{name: value}) == read()
    assert refusal(read, **{name: "something else"}).param == name


INERT_VALUES: dict[str, Any] = {
    "metadata": {"a": "b"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "request_id": "r", "safety_identifier": "s", "service_tier": "flex", "store": True,
    "verbosity": "low",
}  # fmt: skip


@pytest.mark.parametrize("name", INERT_VALUES)
def test_what_has_no_effect_is_accepted_and_its_type_is_looked_at(name: str):
    for read in (chat, completion):
        assert read(**{name: INERT_VALUES[name]}) == read()
        assert refusal(read, **{name: 3}).param == name


def test_beam_search_points_to_n():
    for read in (chat, completion):
        for name, value in (("use_beam_search", True), ("length_penalty", 2.0)):
            assert refusal(read, **{name: value}).message.endswith("for several answers use n")


def test_one_is_not_true():
    assert refusal(chat, best_of=True).param == "best_of"
    assert refusal(chat, echo=0).param == "echo"


def test_response_format():
    assert chat(response_format={"type": "text"}).constraint is None
    found = chat(response_format={"type": "json_object"}).constraint
    assert found == Constraint("json", {"type": "object"}, "response_format")
    assert refusal(chat, response_format={"type": "xml"}).param == "response_format.type"


def test_logprobs_of_chat():
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=False).num_logprobs == -1
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal(chat, top_logprobs=1).param == "top_logprobs"
    assert refusal(chat, logprobs=2).param == "logprobs"


def test_logprobs_of_completions():
    assert completion(logprobs=0).num_logprobs == 0
    assert completion(logprobs=20).num_logprobs == 20
    assert refusal(completion, logprobs=21).param == "logprobs"
    assert refusal(completion, logprobs=True).param == "logprobs"


def test_what_of_the_prompt_is_scored():
    def scored(asked: Asked) -> int:
        return asked.sampling(0, 1, 1, MODEL).num_prompt_logprobs

    assert scored(completion()) == scored(completion(echo=True)) == scored(chat()) == -1
    assert scored(completion(echo=True, logprobs=1)) == 1
    assert scored(completion(logprobs=1)) == -1
    assert scored(completion(echo=True, logprobs=1, prompt_logprobs=5)) == 5
    assert scored(chat(prompt_logprobs=0)) == 0
    assert refusal(chat, prompt_logprobs=21).param == "prompt_logprobs"
    assert refusal(chat, prompt_logprobs=-1).param == "prompt_logprobs"
    assert refusal(chat, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refusal(completion, echo=1).param == "echo"


def test_no_tokens_at_all_only_where_the_prompt_is_told():
    asked = completion(echo=True, max_tokens=0)
    assert asked.no_tokens and asked.max_tokens == 1
    assert refusal(completion, max_tokens=0).param == "max_tokens"
    assert refusal(completion, echo=True, max_tokens=False).param == "max_tokens"
    assert refusal(chat, max_tokens=0).param == "max_tokens"


def test_stream_options():
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"
    error = refusal(chat, stream=True, stream_options={"include_sausage": True})
    assert error.param == "stream_options.include_sausage"


def test_what_may_be_said():
    assert chat(allowed_token_ids=[3, 5]).allowed_token_ids == (3, 5)
    assert chat(bad_words=["no"]).bad_words == ("no",)
    for name, bad in (("allowed_token_ids", [-1]), ("allowed_token_ids", [1] * 1025),
                      ("bad_words", [" "]), ("bad_words", "no"), ("bad_words", ["a"] * 129),
                      ("truncate_prompt_tokens", 0)):  # fmt: skip
        assert refusal(completion, **{name: bad}).param.startswith(name)
    tool = {"type": "function", "function": {"name": "now"}}
    rule = {"ngram_size": 2}
    ruled = {"allowed_token_ids": [3], "bad_words": ["no"], "no_repeat_ngram": rule}
    for name, value in ruled.items():
        shaped = {"response_format": {"type": "json_object"}, name: value}
        assert refusal(chat, **shaped).param == name
        assert refusal(chat, tools=[tool], tool_choice="required", **{name: value}).param == name


def test_stops():
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=["a", "b"]).stops == ("a", "b")
    assert chat(stop=[]).stops == ()


def test_min_tokens_above_max_tokens():
    assert refusal(chat, max_tokens=3, min_tokens=4).param == "min_tokens"


def test_another_model_s_name_is_404():
    assert chat(model="tiny") == chat()
    with pytest.raises(ApiError) as caught:
        chat(model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "'tiny'" in caught.value.message


# --- prompts --------------------------------------------------------------------------------------


def test_prompts():
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ([1, 2],)
    assert completion(prompt=[[1, 2], [3]]).prompts == ([1, 2], [3])


def test_prompts_and_choices_are_bounded_together():
    assert completion(prompt=["a", "b"], n=2).num_choices == 4
    assert refusal(completion, prompt=["a", "b"], n=3).param == "prompt"
    assert refusal(completion, prompt=[[1]] * 5).param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], ["a", ""], ["a", [1]], 3, {}, [1, "a"], [[1], "a"], [[]], [-1], [[-1]]],
)
def test_bad_prompts(prompt: Any):
    assert refusal(completion, prompt=prompt).param.startswith("prompt")


# --- context --------------------------------------------------------------------------------------


def test_context_left_is_the_default():
    assert chat().max_new_tokens(150, MODEL) == 50
    assert chat(max_tokens=50).max_new_tokens(150, MODEL) == 50


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt_tokens", "needed"), [(51, 150, 251 - 50), (None, 200, 201)]
)
def test_context_exceeded_says_needed_and_allowed(
    max_tokens: int | None, num_prompt_tokens: int, needed: int
):
    error = refusal(lambda: chat(max_tokens=max_tokens).max_new_tokens(num_prompt_tokens, MODEL))
    assert error.code == "context_length_exceeded"
    assert error.param == "messages"
    for number in (needed, MODEL.max_context, num_prompt_tokens):
        assert str(number) in error.message


# --- anything at all ------------------------------------------------------------------------------

NAMES = sorted(CHAT | COMPLETION)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool"])},
        optional={
            "content": JSON
            | st.lists(
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["text", "image_url"])},
                    optional={"text": JSON, "image_url": JSON},
                ),
                max_size=3,
            )
        },
    ),
    max_size=3,
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=6)


@given(body=BODIES, messages=MESSAGES | JSON)
def test_any_json_is_read_or_refused(body: dict[str, Any], messages: Any):
    for read, name in ((read_chat, "messages"), (read_completion, "prompt")):
        try:
            asked = read({**body, name: messages}, MODEL, LIMITS)
        except ApiError as error:
            told = msgspec.json.decode(msgspec.json.encode(error.body))["error"]
            assert told["type"] in {"invalid_request_error", "not_found_error"}
        else:
            max_tokens = min(asked.max_tokens or 1, MODEL.max_context)
            msgspec.msgpack.encode(asked.sampling(0, asked.seed or 0, max_tokens, MODEL))


@given(body=st.binary(max_size=64) | JSON.map(msgspec.json.encode))
def test_any_bytes_are_an_object_or_a_400(body: bytes):
    try:
        found: Any = parse_object(body)
    except ApiError as error:
        found = {error.status: error.code}
        assert found == {400: "invalid_json"}
    assert isinstance(found, dict)


def test_broken_json_says_where():
    with pytest.raises(ApiError, match=r"byte 8"):
        parse_object(b'{"a": 1,}')
    with pytest.raises(ApiError, match=r"nested too deeply"):
        parse_object(b'{"a":' + b"[" * 100_000)


# --- what other servers take too ------------------------------------------------------------------


def test_stop_tokens_of_the_client_outlive_ignore_eos():
    assert chat(stop_token_ids=[7]).all_stop_token_ids(MODEL) == (EOS, 7)
    assert chat(stop_token_ids=[7], ignore_eos=True).all_stop_token_ids(MODEL) == (7,)


@pytest.mark.parametrize("value", [[-1], [0x110000], ["7"], [True], 7, [7] * 17])
def test_bad_stop_tokens(value: Any):
    assert "stop_token_ids" in refusal(chat, stop_token_ids=value).message


def test_usage_in_every_chunk_needs_usage():
    path = "stream_options.continuous_usage_stats"
    asked = chat(stream=True, stream_options={"include_usage": True, path.split(".")[1]: True})
    assert (asked.include_usage, asked.continuous_usage) == (True, True)
    assert refusal(chat, stream=True, stream_options={path.split(".")[1]: True}).param == path
