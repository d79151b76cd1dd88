"""Ranks that share a model answer as one process does, and as transformers does.

Real processes over gloo: four are started once, and all groups are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.base import StepFailure
from epd.messages import TokenLogprobs
from epd.shares import most, owners
from tests.engine.adapters import make_adapter
from tests.engine.conftest import chat, drawn_image
from tests.engine.draft_models import make_drafting
from tests.engine.eagle_heads import make_head
from tests.engine.language.test_lora import KINDS, merged
from tests.engine.language.test_speculation import HARD
from tests.engine.reference import reference_generate, reference_inputs, reference_logits
from tests.engine.tiny_models import EMBEDDED, make_model
from tests.groups.device import ranks_cases
from tests.groups.device.draft_cases import drafted
from tests.groups.device.ranks import SIZES, Ranks

UNEVEN = {"num_key_value_heads": 3, "head_dim": 16, "vocab_size": 275, "intermediate_size": 97}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 72, "num_attention_heads": 9, "attention_bias": True, "mlp_bias": True,
    },
    "qwen3_vl_moe": {"num_attention_heads": 6, "moe_intermediate_size": 56},
}  # fmt: skip
MODELS = ("embedded", *CHANGES)
CHANGES |= {
    "qwen3_5": {  # a rank of two has one key head, and another two; of four two have the same one
        "num_attention_heads": 6, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    },
    "qwen3_5_moe": {"num_attention_heads": 6, "moe_intermediate_size": 56},
}  # fmt: skip
CHANGES["kimi_k25"] = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
NUM_TOWER_LAYERS = 6  # of the bundled model
PROMPT = list(b"the quick brown fox")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Heads, MLP and vocabulary of all but the bundled one cannot be shared out evenly."""

    @cache
    def make(name: str) -> Path:
        if name == "embedded":
            return EMBEDDED
        return make_model(name, tmp_path_factory.mktemp(name), UNEVEN | CHANGES[name])

    return make


def cases(name: str) -> list[ranks_cases.Case]:
    text: list[ranks_cases.Case] = [(chat("hello there"), []), (chat("2 + 2?", "4", "3 + 3?"), [])]
    if name == "llama":
        return text
    return [*text, (chat((2, "which?")), [drawn_image(3, 33, 47), drawn_image(4, 90, 50)])]


def golden(directory: Path, name: str) -> list[list[int]]:
    most = ranks_cases.LIMIT["max_tokens"]
    return [reference_generate(directory, *case, most) for case in cases(name)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_generate(name: str, ranks: Ranks, model: Callable[[str], Path]) -> None:
    """Chunks beside decodes, images, drafts; through transformers' layers and the fused ones."""
    directory = model(name)
    expected = golden(directory, name)
    for size, fused in ((1, False), (2, False), (4, True)):
        drafts = expected[1:] if fused else expected[:1]
        found = ranks.run(size, ranks_cases.answers, directory, cases(name), 13, drafts, fused)
        assert found == [expected] * size, (size, fused)


@pytest.mark.parametrize(
    ("name", "size", "chunk"),
    [
        ("qwen3_5", 4, 13),
        *(
            pytest.param(name, size, chunk, marks=pytest.mark.long)
            for name in ("qwen3_5", "qwen3_5_moe")
            for size in SIZES[1:]
            for chunk in (5, 64, 4096)
        ),
    ],
)
def test_states_are_shared_out_by_heads(
    name: str, size: int, chunk: int, ranks: Ranks, model: Callable[[str], Path]
) -> None:
    """Chunks that cut images beside decodes; heads that cannot be shared out evenly; drafts."""
    directory = model(name)
    expected = golden(directory, name)
    found = ranks.run(size, ranks_cases.answers, directory, cases(name), chunk, expected[1:])
    assert found == [expected] * size


@pytest.mark.parametrize(
    "name", ["qwen3_5", "kimi_k25", pytest.param("qwen3_5_moe", marks=pytest.mark.long)]
)
def test_ranks_draft_by_the_models_layer(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """All the same, as one process does; and answers are transformers'."""
    directory = make_drafting(name, tmp_path, agreeing=name != "qwen3_5_moe")
    expected = golden(directory, name)
    alone = ranks.run(1, drafted, directory, cases(name))
    assert alone[0][0] == expected
    found = ranks.run(2, drafted, directory, cases(name))
    assert found == alone * 2


def test_ranks_draft_by_a_head(ranks: Ranks, tmp_path: Path) -> None:
    """A layer of it is cut as the model's: nine heads over three of keys, unevenly."""
    more = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    directory = make_model("llama", tmp_path / "model", more)
    expected = golden(directory, "llama")
    known = reference_inputs(directory, *cases("llama")[0])["input_ids"][0].tolist() + expected[0]
    head = str(make_head(tmp_path / "head", directory, [known]))
    alone = ranks.run(1, drafted, directory, cases("llama"), head)
    assert alone[0][0] == expected and any(alone[0][1]["0"])
    assert ranks.run(2, drafted, directory, cases("llama"), head) == alone * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_wrong_state_of_one_rank_is_noticed(
    victim: int, ranks: Ranks, model: Callable[[str], Path]
) -> None:
    """Each of its blocks, swapped with another sequence's, a token old, or dropped; without that
    logits are those of transformers."""
    directory = model("qwen3_5")
    found = ranks.run(2, ranks_cases.damaged, directory, victim)
    assert found[0] == found[1]
    ids, logits, changes = found[0]
    expected = reference_logits(directory, ids, ())
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=0)
    assert len(changes) >= 6
    assert all(change > 1e-3 for change in changes.values()), changes


def test_latent_rows_are_at_every_rank(ranks: Ranks, model: Callable[[str], Path]) -> None:
    """Six heads on four ranks, experts in parts; what is cached is the same everywhere."""
    directory = model("kimi_k25")
    expected = golden(directory, "kimi_k25")
    for size in SIZES[1:]:
        found = ranks.run(size, ranks_cases.answers, directory, cases("kimi_k25"), 13, expected[:1])
        assert found == [expected] * size, size
        heads = {heads for heads, _ in ranks.run(size, ranks_cases.held, directory)}
        assert heads == {range(1)}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["gemma4_moe", pytest.param("gemma4", marks=pytest.mark.long)])
def test_rows_of_several_kinds_are_shared_out_alike(
    name: str, size: int, ranks: Ranks, model_dir: Callable[[str], Path]
) -> None:
    """Kinds of one head and of two; prompts over windows, pictures that are seen both ways; one
    that is preempted."""
    directory = model_dir(name)
    expected = golden(directory, name)
    for ask in (
        (ranks_cases.answers, directory, cases(name), 13, expected[:1]),
        (ranks_cases.from_slots, directory, cases(name), ("sharded", "first"), 4096),
    ):
        assert ranks.run(size, *ask) == [expected] * size, ask[0]
    (said,) = {tuple(one) for one in ranks.run(size, ranks_cases.preempted, directory, PROMPT)}
    until = reference_generate(directory, PROMPT, (), ranks_cases.LIMIT["max_tokens"])
    assert list(said[: len(until)]) == until  # a model may end there


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk", [5, 16, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_generate_in_any_chunks(
    name: str, chunk: int, fused: bool, ranks: Ranks, model: Callable[[str], Path]
) -> None:
    directory = model(name)
    expected = golden(directory, name)
    for size in SIZES:
        for drafts in ((), expected):
            found = ranks.run(
                size, ranks_cases.answers, directory, cases(name), chunk, drafts, fused
            )
            assert found == [expected] * size, size


@pytest.mark.parametrize(("size", "kinds"), [(2, ("sharded", "all", "first")), (4, ("sharded",))])
def test_rows_come_into_slots_of_the_ranks(
    size: int, kinds: tuple[str, ...], ranks: Ranks, model: Callable[[str], Path]
) -> None:
    """In chunks that cut images; several images in one gather, of one row and of many."""
    directory, asked, expected = with_images(model)
    for chunk in (7, 4096):
        found = ranks.run(size, ranks_cases.from_slots, directory, asked, kinds, chunk)
        assert found == [expected] * size, chunk


def test_who_gives_way_reads_its_rows_again(ranks: Ranks, model: Callable[[str], Path]) -> None:
    """Its images are partly read when its blocks go; ranks join the same rows once more, beside
    those who go on."""
    directory, asked, expected = with_images(model)
    given = (ranks_cases.from_slots, directory, asked, ("sharded", "first"), 16, 4)
    assert ranks.run(2, *given) == [expected] * 2


def with_images(
    model: Callable[[str], Path],
) -> tuple[Path, list[ranks_cases.Case], list[list[int]]]:
    """A model, what it is asked, and what transformers answers."""
    directory = model("qwen3_vl_moe")
    asked = [*cases("qwen3_vl_moe"), (chat((1, "tiny")), [drawn_image(5, 32, 32)])]
    most = ranks_cases.LIMIT["max_tokens"]
    return directory, asked, [reference_generate(directory, *case, most) for case in asked]


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_preempted_request_goes_on(name: str, ranks: Ranks, model: Callable[[str], Path]) -> None:
    """Its blocks hold what it left there."""
    directory = model(name)
    expected = reference_generate(directory, PROMPT, (), ranks_cases.LIMIT["max_tokens"])
    assert ranks.run(2, ranks_cases.preempted, directory, PROMPT) == [expected] * 2


def test_any_sampling_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    """Drawn tokens depend on the seed and not on who draws."""
    asked = [cases("embedded")[0]] * len(HARD)
    samplings = [{"max_tokens": 16} | params | {"max_tokens": 16} for params in HARD.values()]
    arguments = (EMBEDDED, asked, 16, (), False, samplings)
    (alone,) = ranks.run(1, ranks_cases.answers, *arguments)
    assert len({tuple(answer) for answer in alone}) > 3
    assert ranks.run(2, ranks_cases.answers, *arguments) == [alone] * 2


@pytest.mark.parametrize(("size", "fused"), [(2, True), (4, False)])
def test_the_first_rank_knows_what_there_is_to_say(
    size: int, fused: bool, ranks: Ranks, model: Callable[[str], Path]
) -> None:
    """Scores of a prompt, log-probabilities, a sequence that fails, and the token that the next
    step takes from the device."""
    arguments = (ranks_cases.outcomes, model("llama"), PROMPT, fused)
    (alone,) = ranks.run(1, *arguments)
    first, *others = ranks.run(size, *arguments)
    for known, found in zip(alone, first, strict=True):
        if isinstance(known, StepFailure):
            assert found == known
        else:
            _assert_close(found, known)
    tokens = [token.token_id for token in alone if isinstance(token, TokenLogprobs)]
    assert len(tokens) == 2
    for other in others:
        assert [t.token_id for t in other if isinstance(t, TokenLogprobs)] == tokens


def _assert_close(found: TokenLogprobs, known: TokenLogprobs) -> None:
    assert found.token_id == known.token_id
    assert found.rank == pytest.approx(known.rank, abs=2)  # where two are nearly as likely
    assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in known.top]
    for mine, theirs in zip(found.prompt, known.prompt, strict=True):
        _assert_close(mine, theirs)


def test_eight_bits_are_cut_too(ranks: Ranks) -> None:
    """Scales differ, so answers may; ranks agree."""
    asked = cases("embedded")[:1]
    arguments = (EMBEDDED, asked, 16, (), True, (), "fp8")
    first, second = ranks.run(2, ranks_cases.answers, *arguments)
    assert first == second
    assert first == ranks.run(1, ranks_cases.answers, *arguments)[0]


@pytest.mark.parametrize(("name", "size", "fused"), [("llama", 2, True), ("embedded", 4, False)])
def test_adapters_are_cut_as_the_layers_are(
    name: str, size: int, fused: bool, ranks: Ranks, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """By heads that are shared out unevenly, too.  As merged into the model, by transformers; on
    a rank for itself, and on several; where they come while it serves, too."""
    directory = model(name)
    made = [make_adapter(tmp_path / str(n), directory, n, **kind) for n, kind in enumerate(KINDS)]
    expected = merged(directory, made, tmp_path, sees=name == "embedded")
    for number in (1, size):
        found = ranks.run(number, ranks_cases.of_adapters, directory, made, fused)
        assert found == [expected] * number, number
    assert (
        ranks.run(size, ranks_cases.of_adapters, directory, made, fused, "", True)
        == [expected] * size
    )


@pytest.mark.long
def test_eight_bits_of_delta_nets_are_cut_too(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks round other sums; so they are off by no more than rounding to eight bits is, which
    such wide random weights make much of.  Short prompts: a long one is nothing but that."""
    wide = {"linear_value_head_dim": 16, "intermediate_size": 128}  # all of it can be converted
    directory, off = make_model("qwen3_5", tmp_path, wide), torch.zeros(2)
    for ids in ([3, 4], [5, 9, 100], [7, 8, 9, 10]):
        asked = ranks_cases.prompted, directory, ids
        (exact,), (alone,) = (ranks.run(1, *asked, how) for how in ("", "fp8"))
        first, second = ranks.run(2, *asked, "fp8")
        assert first == second
        known, one, two = (torch.tensor(logits) for logits in (exact, alone, first))
        off += torch.stack([(one - known).norm(), (two - one).norm()]) / known.norm()
    assert off[1] < off[0] < 3


def test_ranks_say_which_heads_they_hold(ranks: Ranks, model: Callable[[str], Path]) -> None:
    """All have as many blocks, though one holds more heads in each."""
    found = ranks.run(2, ranks_cases.held, model("llama"))
    assert [heads for heads, _ in found] == [range(1), range(1, 3)]
    assert found[0][1] == found[1][1]
    four = ranks.run(4, ranks_cases.held, EMBEDDED)
    assert [heads.start for heads, _ in four] == [0, 0, 1, 1]


@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_share_out_the_images_of_a_batch(size: int, ranks: Ranks) -> None:
    """The first has all rows in order; an image that fails, fails alone (F13)."""
    images = [drawn_image(i, 40 + 11 * i, 70 - 9 * i) for i in range(4)]
    for broken in range(4):  # some rank's
        (alone,) = ranks.run(1, ranks_cases.encoded, EMBEDDED, images, broken)
        found, *others = ranks.run(size, ranks_cases.encoded, EMBEDDED, images, broken)
        for index, (rows, expected) in enumerate(zip(found, alone, strict=True)):
            if index == broken:
                assert "not finite" in rows and "failed" in expected
            else:
                torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected))
        assert others == [[]] * (size - 1)
    (lonely,) = ranks.run(1, ranks_cases.encoded, EMBEDDED, images[:1], -1)
    assert ranks.run(size, ranks_cases.encoded, EMBEDDED, images[:1], -1)[0] == lonely


@pytest.mark.parametrize(
    ("size", "num_images", "broken", "num_turns", "late"),
    [
        (2, 3, -1, 3, 0),
        (2, 1, -1, 2, 1),
        (2, 3, 1, 9, 1),
        *(
            pytest.param(size, 3, broken, num_turns, late, marks=pytest.mark.long)
            for size in SIZES[1:]
            for broken in (-1, 0, 2)
            for num_turns in (1, 9)
            for late in range(2)
        ),
    ],
)
def test_steps_are_let_in_where_a_batch_takes_its_turns(
    size: int, num_images: int, broken: int, num_turns: int, late: int, ranks: Ranks
) -> None:
    """At the same turns on all ranks, though some have fewer slices, no image, one that fails (F13)
    or are late; answers are those of one process."""
    images = [drawn_image(i, 60 + 11 * i, 90 - 9 * i) for i in range(num_images)]
    given = (ranks_cases.let_in, EMBEDDED, images, broken, PROMPT, num_turns, late)
    ((expected, tokens, _),) = ranks.run(1, *given)
    found = ranks.run(size, *given)
    for index, (rows, wanted) in enumerate(zip(found[0][0], expected, strict=True)):
        if index == broken:
            assert "not finite" in rows and "failed" in wanted
        else:
            torch.testing.assert_close(torch.tensor(rows), torch.tensor(wanted))
    each = -(-NUM_TOWER_LAYERS // num_turns)
    slices = ["l" * each] * (NUM_TOWER_LAYERS // each)
    cut = "s".join(slices) + "s" * (num_turns - len(slices) + 1)
    whole = "s" * num_turns  # of who has no image that does not fail
    for rank, (rows, said, launched) in enumerate(found):
        assert said == tokens and bool(rows) is not bool(rank)
        is_sure = broken < 0 and rank < num_images
        assert launched == cut if is_sure else launched in {cut, whole}, (rank, launched)


def test_the_largest_images_are_shared_out_first() -> None:
    sizes = [4, 16, 8, 8, 32, 4]
    assert owners(sizes, 2) == [0, 1, 1, 1, 0, 1] and most(sizes, 2) == 36
    assert owners(sizes[:1], 4) == [0]
    assert owners(sizes, 1) == [0] * 6
