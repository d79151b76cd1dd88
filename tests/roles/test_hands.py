"""What an instance reports of what it has at hand, and whose turn it is among suspects."""

from __future__ import annotations

from dataclasses import dataclass

from epd.roles.hands import Hands


@dataclass
class Asked:
    request_id: str
    has_yielded: bool = False
    is_due: bool = True


def test_what_enters_is_reported_and_what_leaves_goes_with_it() -> None:
    hands = Hands()
    said: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    hands.on_taken = lambda: said.append((hands.images, hands.requests))
    hands.take(["x", "y"])
    hands.leave(["x"])
    hands.hold(("r", "s"))
    hands.hold(("r", "s"))
    hands.hold(("s",))
    hands.leave(["y"])
    hands.hold(("s", "t"))
    assert said == [(("x", "y"), ()), (("y",), ("r", "s")), ((), ("s", "t"))]


def test_suspects_are_at_hand_one_at_a_time_and_who_waits_is_woken() -> None:
    hands = Hands()
    woken: list[str] = []
    hands.on_free.append(lambda: woken.append("look"))
    suspects = {"a/1": Asked("a"), "b/1": Asked("b"), "c/1": Asked("c")}
    assert hands.claim("x") and hands.claim("x") and not hands.claim("y")
    assert hands.passed_over(suspects) == ["a/1", "b/1", "c/1"], "an image is at hand"
    hands.release("x")
    assert woken == ["look"]
    suspects["a/1"].is_due = False
    assert hands.passed_over(suspects) == ["a/1", "c/1"]
    hands.hold(("b", "r"), "b")
    assert not hands.claim("y") and hands.passed_over(suspects) == ["a/1", "c/1"]
    suspects["b/1"].has_yielded = True
    hands.hold(("r",))
    assert woken == ["look"] * 2 and hands.passed_over(suspects) == ["a/1"]
    assert list(suspects) == ["a/1", "c/1"] and hands.claim("y")
