"""On which nodes and GPUs of an allocation each worker runs, from the variables that Slurm sets. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_MOST_NODES = 65536


class BadAllocation(ValueError):
    """Nodes that the workers do not fit on, or variables that are not Slurm's; the text says what is missing."""


class SlurmNode(NamedTuple):
    """``tasks``: workers' GPUs, or processes without them, that it takes."""

    name: str
    tasks: int


class SlurmGroup(NamedTuple):
    """``number`` workers of ``size`` GPUs each."""

    role: str
    number: int
    size: int


class Instance(NamedTuple):
    """A worker on its nodes.

    Attributes:
        devices: indices of its GPUs, on each of its nodes.
    """

    name: str
    role: str
    nodes: tuple[str, ...]
    size: int
    devices: tuple[int, ...]


def nodes_of(names: str, tasks: str) -> list[SlurmNode]:
    """
    Args:
        names: SLURM_JOB_NODELIST, such as ``gpu[01-03,7],login``.
        tasks: SLURM_TASKS_PER_NODE, such as ``4(x2),3``.

    Raises:
        BadAllocation: they have another form, or are of different numbers of nodes.
    """
    hosts = list(expand(names))
    counts: list[int] = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match or int(match[2] or 1) > _MOST_NODES:
            raise BadAllocation(f"SLURM_TASKS_PER_NODE {tasks!r}: expected a form such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(hosts) != len(counts):
        raise BadAllocation(
            f"SLURM_JOB_NODELIST {names} has {len(hosts)} nodes, and SLURM_TASKS_PER_NODE {tasks} says {len(counts)}"
        )
    return [SlurmNode(*each) for each in zip(hosts, counts, strict=True)]


def expand(names: str) -> Iterator[str]:
    """The hosts of Slurm's short form.

    Raises:
        BadAllocation: it has another form.
    """
    wrong = BadAllocation(f"SLURM_JOB_NODELIST {names!r}: expected a form such as gpu[01-03,7],login")
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", names)
    if not words or ",".join(words) != names:
        raise wrong
    for word in words:
        yield from _expand_word(word, wrong)


def _expand_word(word: str, wrong: BadAllocation) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise wrong
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise wrong
        for number in range(int(first), int(last) + 1):
            for end in _expand_word(after, wrong):
                yield f"{before}{number:0{len(first)}d}{end}"


def place(groups: Sequence[SlurmGroup], nodes: Sequence[SlurmNode]) -> list[Instance]:
    """Place each worker on the first node with room; one of several nodes gets whole ones.

    Raises:
        BadAllocation: there are too few tasks.
    """
    room = {node.name: list(range(node.tasks)) for node in nodes}
    whole = {node.name: node.tasks for node in nodes}
    placed = []
    for group in groups:
        for index in range(group.number):
            chosen = _room(group.size, room, whole)
            if not chosen:
                raise BadAllocation(_too_few(groups, nodes))
            per_node = group.size // len(chosen)
            devices = tuple(room[chosen[0]][:per_node])
            for node in chosen:
                del room[node][:per_node]
            stem = "worker" if group.role == "aggregated" else group.role
            placed.append(Instance(f"{stem}-{index}", group.role, chosen, group.size, devices))
    return placed


def _room(size: int, room: Mapping[str, list[int]], whole: Mapping[str, int]) -> tuple[str, ...]:
    for name, free in room.items():
        if len(free) >= size:
            return (name,)
    empty = [name for name, free in room.items() if free and len(free) == whole[name]]
    per_node = max((whole[name] for name in empty), default=0)
    if size <= per_node or not per_node or size % per_node:
        return ()
    alike = [name for name in empty if whole[name] == per_node]
    needed = size // per_node
    return tuple(alike[:needed]) if len(alike) >= needed else ()


def node_count(groups: Sequence[SlurmGroup], tasks_per_node: int) -> int:
    """How many nodes of ``tasks_per_node`` the workers need.

    Raises:
        BadAllocation: a worker does not fill its nodes.
    """
    for group in groups:
        if group.size > tasks_per_node and group.size % tasks_per_node:
            raise BadAllocation(
                f"a {group.role} worker of {group.size} GPUs does not fill nodes of {tasks_per_node}; use a multiple"
            )
    most = sum(group.number * math.ceil(group.size / tasks_per_node) for group in groups)
    used = {
        node for each in place(groups, [SlurmNode(str(n), tasks_per_node) for n in range(most)]) for node in each.nodes
    }
    return len(used)


def _too_few(groups: Sequence[SlurmGroup], nodes: Sequence[SlurmNode]) -> str:
    needs = " and ".join(f"{group.number} x {group.role} of {group.size}" for group in groups)
    total = sum(group.number * group.size for group in groups)
    have = ", ".join(f"{node.name} with {node.tasks}" for node in nodes)
    return (
        f"{needs} need {total} tasks, and the allocation has {sum(node.tasks for node in nodes)} ({have}): "
        "ask for more with --nodes and --ntasks-per-node"
    )
