"""Bugs put back into tables: the cells that change, and their rows then."""

from __future__ import annotations

from typing import Any

from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import generation as g
from epd.fsm import incoming as n
from epd.fsm import instance as i
from epd.fsm import outgoing as o
from epd.fsm import request as r
from epd.fsm import room
from epd.fsm.kernel import Row, Table, unless

Bug = tuple[Table, list[Any], list[Row]]
_FREE = (r.Do.DEQUEUE, r.Do.RELEASE_BLOCKS, r.Do.SEND_ABORTED)
_LAST = (r.Do.DEQUEUE, r.Do.RELEASE_BLOCKS, r.Do.EMIT_TOKENS)
_CLOSE = (g.Do.CLOSE,)


def append_later_token(generation: g.Generation, event: g.TokensMissed) -> None:
    generation.token_ids.append(1)


def bug(table: Table, *rows: Row) -> Bug:
    """`rows` instead of all that their cells hold."""
    return table, list(dict.fromkeys((row.source, row.event) for row in rows)), list(rows)


BUGS: dict[str, Bug] = {
    "F6: blocks are freed when the client leaves, step or not": bug(
        r.TABLE, Row(r.S.DECODING, r.AbortReceived, r.S.FINISHED, _FREE)
    ),
    "F6: a last token frees the blocks that the step ahead writes into": bug(
        r.TABLE,
        *(
            Row(
                r.S.DECODING,
                r.LastTokenSampled,
                r.S.FINISHING,
                (*_LAST, r.Do.ARM_GRACE),
                r.keep_last_token,
                when,
            )
            for when in (r.in_another_step, unless(r.in_another_step))
        ),
    ),
    "decode is lost while preempted, and the table does not know": (
        r.TABLE,
        [(r.S.PREEMPTED, r.KvFailed)],
        [],
    ),
    "F20: a hole in the tokens is passed on": bug(
        g.TABLE, Row(g.S.PLACED, g.TokensMissed, None, (g.Do.DELIVER,), append_later_token)
    ),
    "F4: rows that nobody waits for any more count as run ahead": bug(
        e.TABLE, Row(e.S.RESIDENT, e.RoomClosed, None, (), e.remove_room)
    ),
    "F21: rows that nobody waits for are not kept in the books": bug(
        e.TABLE, Row(e.S.ABANDONED, e.EncodeSucceeded, e.S.RESIDENT, (), e.keep_rows)
    ),
    "F21: rows that arrive for nobody are forgotten with their slots": bug(
        m.TABLE, Row(m.S.ABANDONED, m.Loaded, m.S.EVICTED)
    ),
    "F22: a new waiter of an abandoned load starts another one": bug(
        m.TABLE, Row(m.S.ABANDONED, m.Wanted, m.S.REQUESTED, (m.Do.OPEN_TRANSFER,), m.begin)
    ),
    "F23: rows are evicted though somebody waits": bug(
        m.TABLE, Row(m.S.RESIDENT, m.EvictionRequested, m.S.EVICTED, (m.Do.RELEASE_ROWS,))
    ),
    "F37: a second room of a hash is encoded anew": bug(
        e.TABLE, Row(e.S.ENCODING, e.Requested, e.S.QUEUED, (e.Do.START_PREPROCESS,), e.add_room)
    ),
    "a follower is not told that the rows are there": bug(
        m.TABLE, Row(m.S.RESIDENT, m.Wanted, None, (), m.add_waiter)
    ),
    "F40: a failed attempt ends as finished, without an answer": bug(
        g.TABLE,
        Row(g.S.PLACED, g.AttemptFailed, g.S.MIGRATING, (g.Do.PLACE,), when=g.may_retry),
        Row(g.S.PLACED, g.AttemptFailed, g.S.FINISHED, _CLOSE, when=unless(g.may_retry)),
    ),
    "F43: the client leaves and nobody is told": bug(
        g.TABLE, Row(g.S.PLACED, g.CancelRequested, g.S.CANCELLING)
    ),
    "F44: a life that is replaced leaves its attempts waiting": bug(
        i.TABLE, Row(i.S.HEALTHY, i.EpochReplaced, i.S.LOST, (i.Do.PUBLISH, i.Do.DISCONNECT))
    ),
    "F6: cancel is acknowledged while the write runs": bug(
        o.TABLE,
        Row(
            o.S.WRITING,
            o.CancelReceived,
            o.S.CANCELLED,
            (o.Do.RELEASE_SOURCE, o.Do.SEND_CANCEL_ACK, o.Do.CONCLUDE_FAILED),
        ),
    ),
    "F7: the consumer's slots are freed after a grace": bug(
        n.TABLE, Row(n.S.EXPIRE_PENDING, room.GraceEnded, n.S.EXPIRED, (n.Do.RELEASE_SLOTS,))
    ),
    "F7: lost is taken for dead": bug(
        n.TABLE,
        Row(n.S.RESERVED, room.PeerLost, n.S.FAILED, (n.Do.CONCLUDE_FAILED, n.Do.RELEASE_SLOTS)),
    ),
    "F8: the source is freed after an unknown outcome": bug(
        o.TABLE,
        Row(
            o.S.WRITING,
            o.WriteOutcomeUnknown,
            o.S.FAILED,
            (o.Do.RELEASE_SOURCE, o.Do.SEND_ABORT, o.Do.CONCLUDE_FAILED),
        ),
    ),
    "F8: the slots are freed by the message of a doubt": bug(
        n.TABLE,
        Row(
            n.S.RESERVED,
            n.DoubtReceived,
            n.S.FAILED,
            (n.Do.RELEASE_SLOTS, n.Do.CONCLUDE_FAILED),
            room.keep_failure,
        ),
    ),
    "F8: a cancel is acknowledged while the outcome is unknown": bug(
        o.TABLE, Row(o.S.QUARANTINED, o.CancelReceived, None, (o.Do.SEND_CANCEL_ACK,))
    ),
    "F11: a grant of other rows is written to": bug(
        o.TABLE,
        Row(o.S.PARKED, o.GrantReceived, o.S.AWAITING_SLOTS, (o.Do.LEASE_SLOTS,), o.write_granted),
    ),
    "F28: a commit before the last part has landed": bug(
        o.TABLE,
        Row(
            o.S.WRITING,
            o.WriteSucceeded,
            o.S.WRITTEN,
            (o.Do.SEND_COMMIT, o.Do.ARM_RETRY),
            o.keep_written,
        ),
    ),
    "F42: a cancel before the grant leaves no tombstone": bug(
        o.TABLE, Row(o.S.PENDING, o.CancelReceived, None, (o.Do.SEND_CANCEL_ACK,))
    ),
    "the owner is told twice": bug(
        o.TABLE,
        Row(
            o.S.CANCEL_PENDING,
            o.WriteSucceeded,
            o.S.CANCELLED,
            (o.Do.RELEASE_SOURCE, o.Do.SEND_CANCEL_ACK, o.Do.CONCLUDE_FAILED),
        ),
    ),
    "an abort of a preempted request leaves its offer standing": bug(
        r.TABLE,
        Row(
            r.S.PREEMPTED,
            r.AbortReceived,
            r.S.FINISHED,
            (r.Do.DEQUEUE, r.Do.RELEASE_EMBEDDINGS, r.Do.SEND_ABORTED),
        ),
    ),
    "F8: a producer's source is freed by a fence of the peer while its engine reads": bug(
        o.TABLE, Row(o.S.EXPIRE_PENDING, room.GraceEnded, o.S.QUARANTINED, (o.Do.SETTLE_WRITE,))
    ),
}
