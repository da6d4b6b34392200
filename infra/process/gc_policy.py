"""When a process that serves collects garbage: young objects often, everything else hardly ever."""

import gc

# New objects between two collections of the young ones (1 ms in a burst of requests), how many of these between two of
# the middle generation (2 ms; 0: every second one is), and how many of those between two of everything (20 to 40 ms
# with 2,500 open streams; with Python's default, several in a burst). For 400,000 objects of 2,500 streams, collections
# take 1.9 instead of 5.5 ms in all, and 0.8 instead of 1.3 at most (``python -m tests.perf.tuning garbage``).
SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE = 5_000, 0, 800


def freeze_loaded() -> None:
    """Exempt everything that is loaded by now from garbage collection, once a process is ready to serve.

    A full collection of a gateway's or worker's modules stops it for 30 to 50 ms (a model's for 200 ms), once in a few
    thousand requests. From here on only young objects are collected often, so what is made for each request must not be
    left behind in reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE)
