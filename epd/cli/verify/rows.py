"""The table: one row for each thing that is proved, from the files to the answers of processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from epd.cli.verify.findings import Finding, Result, differs
from epd.errors import explain
from epd.later import later


@dataclass(frozen=True, slots=True)
class Row:
    """`place`: module and function that compares; `needs`: rows without which it cannot."""

    name: str
    place: str
    proves: str
    needs: tuple[str, ...] = ()
    of_pictures: bool = False

    @property
    def compare(self) -> Callable[..., Awaitable[Finding]]:
        """Of both sides; of the last row, and of a client of the processes."""
        return later(f"epd.cli.verify.{self.place}")


_LOADS = ("tensors",)
ROWS = (
    Row("tensors", "file_rows:tensors", "every tensor of the files is read, or named"),
    Row("config", "file_rows:config", "all that config.json asks for is implemented, and meant"),
    Row("template", "file_rows:template", "conversations become the same text"),
    Row("tokenizer", "file_rows:tokenizer", "texts become the same tokens, and end at the same"),
    Row("pictures", "file_rows:pictures", "pictures become the same patches", of_pictures=True),
    Row("placeholders", "file_rows:placeholders", "pictures take the same tokens of a prompt",
        of_pictures=True),
    Row("weights", "model_rows:weights", "what is loaded is what transformers loads", _LOADS),
    Row("tower", "model_rows:tower", "pictures become the same rows", _LOADS, of_pictures=True),
    Row("positions", "model_rows:positions", "tokens stand at the same places", _LOADS),
    Row("text", "model_rows:text_logits", "the next token is as likely, behind texts", _LOADS),
    Row("images", "model_rows:picture_logits", "the next token is as likely, behind pictures",
        _LOADS, of_pictures=True),
    Row("answers", "model_rows:answers", "greedy answers are the same, over a paged KV cache",
        _LOADS),
    Row("processes", "model_rows:served", "the same answers, of a process for each stage", _LOADS),
)  # fmt: skip


async def run_row(compare: Callable[[], Awaitable[Finding]]) -> Finding:
    """What it found; an error is a finding, too, so that the rows behind it are not lost."""
    from epd.cli.verify.theirs import LeftOut

    try:
        return await compare()
    except LeftOut as left:
        return Finding(Result.LEFT_OUT, str(left))
    except Exception as error:
        return differs(explain(error)[1])


def withheld(row: Row, findings: dict[str, Finding]) -> Finding | None:
    """Why a row is not run; None: it is."""
    failed = [name for name in row.needs if findings[name].result is Result.DIFFERS]
    return Finding(Result.LEFT_OUT, f"not run: {failed[0]}") if failed else None
