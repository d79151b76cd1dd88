"""Two GPUs that share a model answer as one does, with collectives in captured steps (NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import drawn_image, model_dir  # noqa: F401  (a fixture)
from tests.engine.reference import reference_generate
from tests.engine.test_equality import NEW_TOKENS, cases
from tests.gpu import ranks_cases
from tests.groups.device.ranks import Ranks
from tests.groups.device.ranks_cases import LIMIT

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(300)]
PATIENCE_S = 200.0  # graphs of all sizes are captured first, of each family and number of ranks


@pytest.fixture(scope="module")
def ranks(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"), 2, "nccl", PATIENCE_S)
    yield started
    started.close()


@pytest.mark.parametrize("family", ["embedded", "qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_greedy_equals_generate(
    family: str,
    ranks: Ranks,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """In fp32: images, chunks beside decodes; from captured graphs, on one GPU and on two."""
    directory = model_dir(family)
    expected = [reference_generate(directory, p, i, NEW_TOKENS) for p, i in cases(family)]
    for size in (1, 2):
        for chunk in (4096, 16):
            found = ranks.run(
                size, ranks_cases.answers, directory, cases(family), NEW_TOKENS, chunk
            )
            assert found == [expected] * size, (size, chunk)


@pytest.mark.parametrize("family", ["embedded", "qwen3_vl"])
def test_rows_come_into_slots_of_the_ranks(
    family: str,
    ranks: Ranks,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """Parts of images from the host's slots of both ranks, joined by a gather; whole images; and
    those that the first rank has."""
    directory, asked = model_dir(family), cases(family)
    expected = [reference_generate(directory, *case, LIMIT["max_tokens"]) for case in asked]
    for chunk in (7, 4096):
        found = ranks.run(
            2, ranks_cases.from_slots, directory, asked, ("sharded", "all", "first"), chunk
        )
        assert found == [expected] * 2, chunk


def test_logits_in_bf16_are_close(
    ranks: Ranks,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    asked = cases("embedded")
    (alone,) = ranks.run(1, ranks_cases.logits, model_dir("embedded"), asked)
    first, second = ranks.run(2, ranks_cases.logits, model_dir("embedded"), asked)
    assert first == second
    for found, expected in zip(first, alone, strict=True):
        known = torch.tensor(expected)
        limit = 0.05 * float(known.abs().max())
        torch.testing.assert_close(torch.tensor(found), known, atol=limit, rtol=0)


def test_ranks_share_out_images(
    ranks: Ranks,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    images = [drawn_image(i, 40 + 11 * i, 70 - 9 * i) for i in range(4)]
    (alone,) = ranks.run(1, ranks_cases.encoded, model_dir("qwen3_vl"), images)
    found, nothing = ranks.run(2, ranks_cases.encoded, model_dir("qwen3_vl"), images)
    assert nothing == []
    for rows, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("num_images", [1, 4])
def test_steps_are_let_in_where_a_batch_takes_its_turns(
    num_images: int,
    ranks: Ranks,
    model_dir: Callable[[str], Path],  # noqa: F811
) -> None:
    """Captured slices and captured steps, whose collectives meet; fewer turns than slices, and
    more; with one image a rank has none."""
    images = [drawn_image(i, 40 + 11 * i, 70 - 9 * i) for i in range(num_images)]
    for num_turns in (2, 9):
        given = (ranks_cases.let_in, model_dir("embedded"), images, [7, 8, 9], num_turns)
        ((expected, tokens, _),) = ranks.run(1, *given)
        (found, said, _), (nothing, too, _) = ranks.run(2, *given)
        assert nothing == [] and said == too == tokens
        for rows, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(rows), torch.tensor(wanted), atol=1e-3, rtol=0)
