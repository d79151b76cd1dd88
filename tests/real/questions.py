"""Questions to a model that has learned to talk, and in how many ways each is answered.

Text alone: short and long, with a long system message that many share, in two turns, with what
repeats itself, code, digits, other scripts.  Each number gives the same question everywhere.
"""

from __future__ import annotations

from tests.e2e.client import Body

SUBJECTS = (
    *("the moon", "bread", "the river Rhine", "a bicycle", "glass", "the year 1848", "honey bees"),
    *("chess", "rust", "the number 7", "Zürich", "rain", "a violin", "salt", "the heart", "tea"),
    *("a lighthouse", "東京", "paper", "the North Pole", "a clock", "prime numbers", "wool"),
)
ASKED = (
    "What is {}?",
    "Write one sentence about {}.",
    "List three facts about {}.",
    "Repeat this line four times: I would like to know more about {} today.",
    "Write a Python function that prints a line about {}.",
    "Is it true that {} is older than 250 years? Answer yes or no, and why.",
    "Translate into French: we have read a book about {}.",
)
LIBRARY = (
    "You are the assistant of a public library. Answer briefly, name no book that you do not know, "
    "and never give an address. The library opens at 9 in the morning and closes at 6 in the "
    "evening; on Saturdays it closes at 1, and on Sundays it is closed. A card costs nothing for "
    "children and 12.50 a year for everybody else. Books are lent for 28 days, films for 7."
)
# Each has another number of ways than there are of asking, so that all pairs come up.
WAYS: tuple[Body, ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0},
    {"temperature": 1.1, "top_k": 40, "min_p": 0.02},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0},
    {"temperature": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "top_k": 100},
)


def question(number: int, num_tokens: int, *, goes_on: bool = False) -> Body:
    """A chat request, with the ids of its tokens; `goes_on`: behind its end, too."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    text = ASKED[number % len(ASKED)].format(subject)
    messages = [{"role": "user", "content": text}]
    if number % 3 == 1:
        messages.insert(0, {"role": "system", "content": LIBRARY})
    if number % 5 == 4:
        turn = ("Do you know " + subject + "?", "Yes, I do. What would you like to know?")
        roles = zip(("user", "assistant"), turn, strict=True)
        messages[-1:-1] = [{"role": role, "content": said} for role, said in roles]
    way = WAYS[number % len(WAYS)]
    seeded = {"seed": 1000 + number} if way["temperature"] else {}
    end = {"ignore_eos": True} if goes_on else {}
    told = {"max_tokens": num_tokens, "return_token_ids": True, "logprobs": True}
    return {"messages": messages} | way | seeded | end | told
