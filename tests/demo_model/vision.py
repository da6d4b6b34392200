"""Images of simple shapes, and questions about them. A scene is data; Pillow draws it."""

import io
import math
from random import Random
from typing import Any, NamedTuple

from tests.demo_model.sample import UNKNOWN, Message, Sample
from tests.demo_model.template import IMAGE
from tests.demo_model.words import held_out

SIDE = 96  # pixels; width and height of the model's input
PATCH = 12
TOKENS = (SIDE // PATCH) ** 2
MEAN, STD = 0.5, 0.5

COLORS = {
    "red": (214, 39, 40),
    "green": (34, 150, 60),
    "blue": (30, 80, 220),
    "yellow": (245, 205, 20),
    "purple": (140, 50, 170),
    "orange": (250, 130, 20),
    "black": (20, 20, 20),
}
GROUNDS = ((255, 255, 255), (235, 235, 235), (215, 225, 235), (240, 230, 215))
SHAPES = ("circle", "square", "triangle", "star")
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")

TASKS = {"color": 0.95, "shape": 0.95, "count": 0.95, "position": 0.95}
_TRAINED = (*TASKS, "count", "position", "position", "describe")  # harder ones more often


class DrawnShape(NamedTuple):
    """One shape. Position and size are fractions of the image's side."""

    shape: str
    color: str
    cell: int  # of PLACES
    x: float
    y: float
    radius: float
    turn: float  # radians


class Scene(NamedTuple):
    side: int  # pixels
    ground: tuple[int, int, int]
    shapes: tuple[DrawnShape, ...]


def scene(rng: Random, held: bool) -> Scene:
    while True:
        count = rng.choice((1, 1, 2, 3, 4, 5))
        cells = sorted(rng.sample(range(9), count))
        kinds = [(rng.choice(SHAPES), rng.choice(list(COLORS))) for _ in cells]
        if rng.random() < 0.35:  # several of a kind, for questions that count
            same = rng.choice(SHAPES)
            kinds = [(same if rng.random() < 0.7 else shape, color) for shape, color in kinds]
        if held_out("scene", cells, kinds) == held:
            break
    shapes = []
    for cell, (shape, color) in zip(cells, kinds, strict=True):
        x, y = ((cell % 3) + 0.5) / 3, ((cell // 3) + 0.5) / 3
        jitter, radius = 0.035, rng.uniform(0.085, 0.14)
        shapes.append(DrawnShape(shape, color, cell, x + rng.uniform(-jitter, jitter), y + rng.uniform(-jitter, jitter),
                            radius, rng.uniform(-0.15, 0.15)))  # fmt: skip
    return Scene(rng.randint(64, 224), rng.choice(GROUNDS), tuple(shapes))


def draw(scene: Scene) -> Any:
    """Draw the scene as a PIL.Image of its own size."""
    from PIL import Image, ImageDraw

    scale = 2 * scene.side  # drawn at twice the size, for smooth edges
    image = Image.new("RGB", (scale, scale), scene.ground)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        x, y, r = shape.x * scale, shape.y * scale, shape.radius * scale
        shade = COLORS[shape.color]
        if shape.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=shade)
        else:
            pen.polygon([(x + a * r, y + b * r) for a, b in _corners(shape)], fill=shade)
    return image.resize((scene.side, scene.side), Image.Resampling.BOX)


def png(scene: Scene) -> bytes:
    data = io.BytesIO()
    draw(scene).save(data, "PNG")
    return data.getvalue()


def pixels(scene: Scene) -> Any:
    """(3, SIDE, SIDE) uint8, resized as the model's image processor does."""
    import numpy as np
    from PIL import Image

    image = draw(scene).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


def ask(rng: Random, scene: Scene, task: str) -> tuple[str, str, Any] | None:
    """Question, answer, and what an answer must contain; None: the scene allows no question of this kind."""
    shapes = scene.shapes
    shape = rng.choice(shapes)
    same_shape = [other for other in shapes if other.shape == shape.shape]
    same_color = [other for other in shapes if other.color == shape.color]
    the = f"{shape.color} {shape.shape}"
    if task == "color":
        if len(same_shape) > 1:
            return None
        questions = [f"What color is the {shape.shape}?", f"Which color does the {shape.shape} have?"]
        if len(shapes) == 1:
            questions += ["What color is it?", "What color is the shape?", "Which color do you see?"]
        return rng.choice(questions), f"The {shape.shape} is {shape.color}.", shape.color
    if task == "shape":
        if len(same_color) > 1:
            return None
        questions = [f"What shape is the {shape.color} thing?", f"Which shape is {shape.color}?"]
        if len(shapes) == 1:
            questions += ["What shape is it?", "Which shape do you see?", "What shape is this?"]
        return rng.choice(questions), f"It is a {shape.shape}.", shape.shape
    if task == "count":
        if rng.random() < 0.6:
            questions = [
                "How many shapes are there?",
                "How many shapes do you see?",
                "Count the shapes.",
                "How many things are in the picture?",
            ]
            return rng.choice(questions), f"The number of shapes is {len(shapes)}.", len(shapes)
        if rng.random() < 0.7:
            questions = [
                f"How many {shape.shape}s are there?",
                f"How many {shape.shape}s do you see?",
                f"Count the {shape.shape}s.",
            ]
            return rng.choice(questions), f"The number of {shape.shape}s is {len(same_shape)}.", len(same_shape)
        questions = [f"How many shapes are {shape.color}?", f"How many {shape.color} shapes are there?"]
        return rng.choice(questions), f"The number of {shape.color} shapes is {len(same_color)}.", len(same_color)
    if task == "position":
        if sum(other[:2] == shape[:2] for other in shapes) > 1:
            return None
        questions = [
            f"Where is the {the}?",
            f"In which part of the picture is the {the}?",
            f"Where do you see the {the}?",
        ]
        if len(shapes) == 1:
            questions += ["Where is it?", "Where is the shape?"]
        return rng.choice(questions), f"The {the} is at the {PLACES[shape.cell]}.", f"the {PLACES[shape.cell]}."
    listed = [f"{'an' if other.color == 'orange' else 'a'} {other.color} {other.shape}" for other in shapes]
    text = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    questions = [
        "What do you see?",
        "Describe the picture.",
        "What is in the picture?",
        "What is in this image?",
        "Describe this image.",
    ]
    return rng.choice(questions), f"I see {text}.", f"I see {text}."


def looking(rng: Random, held: bool, task: str = "") -> Sample:
    """A question about an image; the first user message begins with its placeholders."""
    while True:
        drawn = scene(rng, held)
        exchange = ask(rng, drawn, task or rng.choice(_TRAINED))
        if exchange is not None:
            question, answer, want = exchange
            return Sample(task or "vision", (("user", f"{IMAGE * TOKENS}\n{question}"),), answer, want, (), drawn)


def vision_conversation(rng: Random) -> tuple[Sample, tuple[Message, ...]]:
    """One to three questions about one image."""
    sample = looking(rng, False)
    messages: list[Message] = [*sample.messages, ("assistant", sample.answer)]
    for _ in range(rng.randint(0, 3)):
        question = ask(rng, sample.scene, rng.choice(_TRAINED))
        if question is not None:
            messages += [("user", question[0]), ("assistant", question[1])]
    return sample, tuple(messages)


def blind(rng: Random, held: bool) -> Sample:
    """The same questions without an image."""
    sample = looking(rng, held)
    question = sample.messages[0][1].removeprefix(f"{IMAGE * TOKENS}\n")
    return Sample("unknown", (("user", question),), UNKNOWN, UNKNOWN)


def cases(task: str, count: int, seed: int) -> list[Sample]:
    rng = Random(f"{seed}:{task}")
    return [looking(rng, True, task) for _ in range(count)]


def _corners(shape: DrawnShape) -> list[tuple[float, float]]:
    count, first = {"square": (4, math.pi / 4), "triangle": (3, -math.pi / 2), "star": (10, -math.pi / 2)}[shape.shape]
    size = 1.1 if shape.shape in ("square", "triangle") else 1.0
    corners = []
    for i in range(count):
        r = size * (0.42 if shape.shape == "star" and i % 2 else 1.0)
        angle = first + 2 * math.pi * i / count + shape.turn
        corners.append((r * math.cos(angle), r * math.sin(angle)))
    return corners
