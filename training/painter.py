"""Turns a layout into pixels, with the place of each character.

A picture is a mask of ink (0..1) between two colours. What a camera does to text is imitated on
the way: a turn of a few degrees, blur, a resize, uneven light, ruled lines, noise. The centre of
each character comes back with it: training learns to see from those before it learns to answer.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from training import fonts
from training.dice import Dice
from training.layout import Content, Layout, Page, Scene, Typesetter
from training.text import Split, TextSource

Pixels = NDArray[np.uint8]
Ink = NDArray[np.float32]
Colour = NDArray[np.float32]

NOISE_SIDE = 1024  # px of the noise sheet that every picture takes its grain from
NOISE_DEVIATION = 32
LUMINANCE = np.array([0.3, 0.59, 0.11], np.float32)
LEAST_CONTRAST = 75  # of 255


@dataclass(frozen=True, slots=True)
class Glyph:
    """One painted character and the px of its centre, always inside the picture."""

    char: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Picture:
    pixels: Pixels  # [height, width, 3]
    content: Content
    glyphs: tuple[Glyph, ...]  # in reading order, blanks left out

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.pixels)


@functools.cache
def noise_sheet() -> NDArray[np.int16]:
    """Gaussian grain, drawn once: [NOISE_SIDE, NOISE_SIDE]."""
    grain = np.random.default_rng(0).standard_normal((NOISE_SIDE, NOISE_SIDE), np.float32)
    return (grain * NOISE_DEVIATION).astype(np.int16)


class Painter:
    """Paints pictures from one seed and one split of the strings."""

    def __init__(
        self, dice: Dice, split: Split = "train", faces: tuple[str, ...] = fonts.BUILT_IN_ONLY
    ) -> None:
        self.dice = dice
        self.text = TextSource(dice, split)
        self.typesetter = Typesetter(dice, self.text, faces)

    def paint(
        self, scene: Scene, page: Page, *, noise: float | None = None, resize: bool | None = None
    ) -> Picture:
        """A picture of the page's size.

        `noise` is its standard deviation in steps of 255, drawn at random if None. With `resize`
        the text is set on a page of another size and scaled, as processors do to sizes that are no
        multiples of a patch; None: by chance.
        """
        dice = self.dice
        if resize is None:
            resize = page.difficulty > 0.5 and dice.random() < 0.2
        set_page = page
        if resize:
            width = max(24, page.width + dice.between(-7, 7))
            height = max(24, page.height + dice.between(-7, 7))
            set_page = replace(page, width=width, height=height)
        layout = self.typesetter.lay_out(scene, set_page)
        mask, glyphs = draw_ink(layout, set_page)
        damage = min(1.0, max(0.0, page.difficulty - 0.3) / 0.5)  # how much of a camera's flaws
        mask, glyphs = self._blur_and_turn(mask, glyphs, layout.face.size, damage)
        if resize:
            mask = mask.resize((page.width, page.height), Image.Resampling.BICUBIC)
        ink = np.asarray(mask, np.float32) * np.float32(1 / 255)
        pixels = self._colour(ink, page, damage, noise)
        scale = (page.width / set_page.width, page.height / set_page.height)
        return Picture(pixels, layout.content, _inside(glyphs, scale, page))

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.dice.random() < probability

    def _blur_and_turn(
        self, mask: Image.Image, glyphs: list[Glyph], size: int, damage: float
    ) -> tuple[Image.Image, list[Glyph]]:
        if self._chance(0.15 * damage):
            degrees = self.dice.span(-3, 3)
            mask = mask.rotate(degrees, Image.Resampling.BILINEAR)
            glyphs = _turned(glyphs, degrees, mask.width / 2, mask.height / 2)
        if self._chance(0.2 * damage):
            radius = self.dice.span(0.2, 0.55 if size < 14 else 0.8)
            mask = mask.filter(ImageFilter.GaussianBlur(radius))
        return mask, glyphs

    def _colour(self, ink: Ink, page: Page, damage: float, noise: float | None) -> Pixels:
        """Ink to RGB: two colours, then uneven light, ruled lines and noise."""
        dice = self.dice
        paper, pen = self._two_colours(page.difficulty)
        base: Colour = paper
        if self._chance(0.2 * damage):
            base = np.clip(paper + self._gradient(page)[..., None], 0, 255)
        image = base + ink[..., None] * (pen - base)
        if self._chance(0.15 * damage):
            self._rule(image, paper + (pen - paper) * np.float32(dice.span(0.2, 0.6)))
        if noise is None:
            clean = damage == 0 or dice.random() < 0.35
            noise = 0.0 if clean else dice.span(2, 22) * damage
        if noise:
            image = image + self._grain(page, noise)
        return np.clip(image, 0, 255).astype(np.uint8)

    def _two_colours(self, difficulty: float) -> tuple[Colour, Colour]:
        """Of paper and pen: black and white, or any two that differ enough in brightness."""
        dice = self.dice
        if self._chance(0.35 if difficulty > 0.3 else 0.7):
            black, white = np.zeros(3, np.float32), np.full(3, 255, np.float32)
            return (black, white) if dice.random() < 0.25 else (white, black)
        while True:
            paper, pen = (
                np.array([dice.random() * 255 for _ in range(3)], np.float32) for _ in range(2)
            )
            if abs((paper - pen) @ LUMINANCE) > LEAST_CONTRAST:
                return paper, pen

    def _gradient(self, page: Page) -> Ink:
        """Brightness to add, [height, width]."""
        span = self.dice.span
        across = np.linspace(span(-30, 30), span(-30, 30), page.width, dtype=np.float32)
        down = np.linspace(span(-20, 20), span(-20, 20), page.height, dtype=np.float32)
        return across[None, :] + down[:, None]

    def _rule(self, image: Colour, colour: Colour) -> None:
        """One to three lines of one px across or down the image, in place."""
        height, width = image.shape[:2]
        for _ in range(self.dice.between(1, 3)):
            if self.dice.random() < 0.6:
                image[self.dice.between(0, height - 1)] = colour
            else:
                image[:, self.dice.between(0, width - 1)] = colour

    def _grain(self, page: Page, noise: float) -> Ink:
        """Noise to add, [height, width, 1 or 3]: the same in all channels, or coloured."""
        if self.dice.random() < 0.5:
            return self._cut_of_noise(page, noise)[..., None]
        first, second = self._cut_of_noise(page, noise), self._cut_of_noise(page, noise)
        return np.stack([first, second, -first], -1)

    def _cut_of_noise(self, page: Page, noise: float) -> Ink:
        top = self.dice.between(0, NOISE_SIDE - page.height)
        left = self.dice.between(0, NOISE_SIDE - page.width)
        cut = noise_sheet()[top : top + page.height, left : left + page.width]
        return cut.astype(np.float32) * np.float32(noise / NOISE_DEVIATION)


def draw_ink(layout: Layout, page: Page) -> tuple[Image.Image, list[Glyph]]:
    """The mask (L, 255 is ink) of a layout, and its characters in reading order."""
    mask = Image.new("L", (page.width, page.height), 0)
    draw = ImageDraw.Draw(mask)
    for box in layout.boxes:
        if not box.inverse:
            draw.rectangle((box.left, box.top, box.right, box.bottom), outline=255)
    glyphs: list[Glyph] = []
    advance = layout.face.advance
    for span in layout.spans:
        pen, top = float(int(span.x)), int(span.y)
        middle = top + layout.face.size * 0.62
        for word in span.text.split(" "):
            draw.text((int(pen), top), word, fill=255, font=layout.face.font)
            for char in word:
                glyphs.append(Glyph(char, pen + advance[char] / 2, middle))
                pen += advance[char]
            pen += advance[" "]
    for box in layout.boxes:
        if box.inverse:
            area = (box.left, box.top, box.right, box.bottom)
            mask.paste(mask.crop(area).point(lambda ink: 255 - ink), area)
    return mask, glyphs


def _turned(glyphs: list[Glyph], degrees: float, x0: float, y0: float) -> list[Glyph]:
    """The characters after a turn of the picture about (x0, y0), counter-clockwise."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [
        Glyph(
            glyph.char,
            x0 + (glyph.x - x0) * cos + (glyph.y - y0) * sin,
            y0 - (glyph.x - x0) * sin + (glyph.y - y0) * cos,
        )
        for glyph in glyphs
    ]


def _inside(glyphs: list[Glyph], scale: tuple[float, float], page: Page) -> tuple[Glyph, ...]:
    """The characters after scaling, held inside the picture."""
    return tuple(
        Glyph(
            glyph.char,
            min(page.width - 1.0, max(0.0, glyph.x * scale[0])),
            min(page.height - 1.0, max(0.0, glyph.y * scale[1])),
        )
        for glyph in glyphs
    )
