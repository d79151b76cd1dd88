"""Random strings to paint: words, names, numbers, prices, dates, codes.

The strings are split in two by a hash: a token of four or more characters is either shown in
training or held out for evaluation. So a right answer in an evaluation is reading, not remembering.
"""

import zlib
from collections.abc import Callable
from typing import Literal

from training.dice import Dice

Split = Literal["train", "test"]

SHORTEST_HELD_OUT = 4  # chars; shorter strings are too few to split
HELD_OUT_ONE_IN = 20
TRIES: dict[Split, int] = {"train": 60, "test": 400}  # a test token is rare: 1 in 20

WORDS = """the and for are but not you all any can had her was one our out day get has him his how
man new now old see two way who boy did its let put say she too use dad mom big red blue green black
white pink gray brown yellow orange purple time year people water first house table chair window
door street city road train plane ship river ocean mountain forest garden flower apple banana cherry
grape lemon melon peach mango bread butter cheese milk coffee sugar pepper salt rice pasta soup
salad pizza burger chicken beef fish egg honey juice wine beer cake cookie candy chocolate market
store shop price total cash card receipt order ticket number phone mail letter paper book page word
line note pen pencil school student teacher doctor nurse driver pilot farmer baker winter summer
spring autumn monday tuesday wednesday thursday friday saturday sunday january february march april
june july august october november december morning evening night today tomorrow north south east
west left right open closed start stop enter exit push pull hot cold fast slow high low light dark
happy quiet simple strong bright clean fresh sweet silver golden copper iron stone glass metal
wooden cotton silk paint brush hammer nail screw engine wheel brake signal radio camera screen
laptop mouse server packet token model vision image memory cache router worker queue vector matrix
kernel tensor graph batch decode encode prefill system network buffer thread socket report budget
invoice account balance payment credit debit refund change office meeting project manager client
company product service quality safety energy power solar planet comet galaxy rocket island bridge
castle tower palace museum theater cinema hotel airport station harbor tunnel square corner center
border limit speed zone danger warning caution private public parking""".split()

ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sm sn sp st str t th "
    "tr v w y z"
).split()
VOWELS = "a e i o u ai ea ee oo ou a e i o u".split()
CODAS = [*"b ck d ft g k l ll m mp n nd ng nk nt p r rd rk rn rt s ss st t th x y".split()]
CODAS += [""] * 12
CODE_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"
DIGITS = "0123456789"
SAME_SHAPE_IN_BOTH_CASES = frozenset("cosuvwxz")

KIND_SHARES = {
    "word": 0.50, "number": 0.13, "code": 0.17, "price": 0.06, "date": 0.03, "time": 0.03,
    "phone": 0.03, "percent": 0.02, "decimal": 0.03,
}  # fmt: skip


def is_held_out(token: str) -> bool:
    """Whether a token (of four or more characters) belongs to evaluation alone."""
    return zlib.crc32(token.encode()) % HELD_OUT_ONE_IN == 0


def is_allowed(token: str, split: Split) -> bool:
    """Whether a picture of this split may show the token.

    A word such as 'cow' is never shown: its letters have one shape in both cases, so nothing in the
    picture distinguishes 'cow' from 'COW'.
    """
    one_case = token.islower() or token.isupper()
    if token.isalpha() and one_case and set(token.lower()) <= SAME_SHAPE_IN_BOTH_CASES:
        return False
    if len(token) < SHORTEST_HELD_OUT:
        return True
    return is_held_out(token) == (split == "test")


class TextSource:
    """Draws tokens of one split."""

    def __init__(self, dice: Dice, split: Split) -> None:
        self.dice = dice
        self.split = split
        self._kinds = list(KIND_SHARES)
        self._shares = list(KIND_SHARES.values())
        self._draw: dict[str, Callable[[int], str]] = {
            "word": self._word, "name": self._name, "number": self._number, "code": self._code,
            "price": self._price, "date": self._date, "time": self._time, "phone": self._phone,
            "percent": self._percent, "decimal": self._decimal, "reading": self._reading,
        }  # fmt: skip

    def token(self, max_chars: int = 12, kind: str | None = None) -> str:
        """A token without spaces; of a given kind, its own length limit goes first."""
        last = ""
        for _ in range(TRIES[self.split]):
            drawn = self._draw[kind or self._any_kind()](max(1, max_chars))
            if kind is None and len(drawn) > max_chars:
                continue
            last = drawn
            if is_allowed(drawn, self.split):
                break
        return last or "7"

    def _any_kind(self) -> str:
        return self.dice.choices(self._kinds, self._shares)[0]

    def _syllable(self) -> str:
        return self.dice.pick(ONSETS) + self.dice.pick(VOWELS) + self.dice.pick(CODAS)

    def _digits(self, count: int) -> str:
        return "".join(self.dice.pick(DIGITS) for _ in range(count))

    def _word(self, max_chars: int) -> str:
        dice = self.dice
        if dice.random() < 0.35:
            word = dice.pick(WORDS)
        else:
            word = "".join(self._syllable() for _ in range(dice.between(1, 3)))
        word = word[:max_chars]
        case = dice.random()
        word = word if case < 0.4 else word.capitalize() if case < 0.7 else word.upper()
        if len(word) < max_chars and dice.random() < 0.06:
            word += dice.pick("!?.,:")
        return word

    def _name(self, max_chars: int) -> str:
        name = "".join(self._syllable() for _ in range(self.dice.between(1, 2)))
        return name.capitalize()[:max_chars]

    def _number(self, max_chars: int) -> str:
        return self._digits(self.dice.between(1, min(max_chars, 7)))

    def _code(self, max_chars: int) -> str:
        dice = self.dice
        length = dice.between(2, min(max_chars, 9)) if max_chars > 2 else max_chars
        code = "".join(dice.pick(CODE_ALPHABET) for _ in range(length))
        if length > 4 and dice.random() < 0.3:
            dash = dice.between(2, length - 2)
            code = code[:dash] + "-" + code[dash + 1 :]
        return code

    def _price(self, max_chars: int) -> str:
        whole = self.dice.between(0, 10 ** self.dice.between(1, 3) - 1)
        return self.dice.pick(["$", "", ""]) + f"{whole}.{self._digits(2)}"

    def _date(self, max_chars: int) -> str:
        dice = self.dice
        year, month, day = dice.between(1990, 2039), dice.between(1, 12), dice.between(1, 28)
        return dice.pick(
            [
                f"{year}-{month:02d}-{day:02d}",
                f"{day:02d}/{month:02d}/{year}",
                f"{day:02d}.{month:02d}.{year % 100:02d}",
            ]
        )

    def _time(self, max_chars: int) -> str:
        return f"{self.dice.between(0, 23):02d}:{self.dice.between(0, 59):02d}"

    def _phone(self, max_chars: int) -> str:
        return f"{self.dice.between(200, 999)}-{self._digits(4)}"

    def _percent(self, max_chars: int) -> str:
        return f"{self.dice.between(1, 100)}%"

    def _decimal(self, max_chars: int) -> str:
        return f"{self.dice.between(0, 999)}.{self.dice.between(0, 9)}"[:max_chars]

    def _reading(self, max_chars: int) -> str:
        """What a meter shows: digits with leading zeros, most often one decimal."""
        whole = self._digits(self.dice.between(3, 6))
        return whole + ("." + self._digits(1) if self.dice.random() < 0.7 else "")
