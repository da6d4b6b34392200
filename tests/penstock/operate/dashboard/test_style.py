"""The page's colours can be told apart: texts have a contrast of at least 4.5 to 1 (WCAG 2.1, 1.4.3)."""

import re
from pathlib import Path

import pytest

import penstock.operate.dashboard

CSS = (Path(penstock.operate.dashboard.__file__).parent / "static" / "style.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#[0-9a-f]+)", part)) for part in CSS.split("@media", 2)[:2])


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["text", "quiet", "accent", "good", "warn", "bad", "run"])
@pytest.mark.parametrize("behind", ["ground", "panel"])
def test_texts_have_enough_contrast(colours: dict[str, str], text: str, behind: str) -> None:
    one, other = sorted(luminance(colours[name]) for name in (text, behind))
    assert (other + 0.05) / (one + 0.05) >= 4.5
