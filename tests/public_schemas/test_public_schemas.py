"""Real schemas, as people write them."""

from __future__ import annotations

from tests.public_schemas.judge import DATA, paths, share


def test_no_invalid_instance_of_a_public_schema_is_accepted() -> None:
    files = paths([DATA])
    letter, _, _ = share(files, closes=False)
    closed, _, _ = share(files, closes=True)
    assert letter.invalid_taken == closed.invalid_taken == 0
    assert letter.passed >= 0.87 * letter.schemas, letter
    assert letter.valid_taken > closed.valid_taken > 0
