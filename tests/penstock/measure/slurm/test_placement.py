"""Where workers run in an allocation."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.slurm.placement import BadAllocation, SlurmGroup, SlurmNode, node_count, nodes_of, place


def test_nodes_and_tasks_are_read_in_the_form_that_slurm_writes() -> None:
    nodes = nodes_of("gpu[08-10,7]-ib,login", "4(x3),2,8")
    names = ("gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu7-ib", "login")
    assert nodes == [SlurmNode(name, tasks) for name, tasks in zip(names, (4, 4, 4, 2, 8), strict=True)]
    assert [node.name for node in nodes_of("r[1-2]n[1-2]", "1(x4)")] == ["r1n1", "r1n2", "r2n1", "r2n2"]


@pytest.mark.parametrize(
    ("names", "tasks", "said"),
    [
        ("a[1-3]", "4(x2)", "3 nodes, and SLURM_TASKS_PER_NODE 4(x2) says 2"),
        ("a[1-", "4", "expected a form such as gpu"),
        ("a[3-1]", "4", "expected a form such as gpu"),
        ("a[1-999999999]", "4", "expected a form such as gpu"),
        ("", "4", "expected a form such as gpu"),
        ("a", "", "expected a form such as 4(x2)"),
        ("a", "4(x999999999)", "expected a form such as 4(x2)"),
    ],
)
def test_variables_of_another_form_are_refused_by_name(names: str, tasks: str, said: str) -> None:
    with pytest.raises(BadAllocation) as refused:
        nodes_of(names, tasks)
    assert said in str(refused.value)


def test_small_workers_share_a_node_and_large_ones_have_whole_nodes() -> None:
    nodes = [SlurmNode(name, 4) for name in "abcd"]
    placed = place([SlurmGroup("prefill", 2, 2), SlurmGroup("decode", 1, 8), SlurmGroup("encode", 1, 1)], nodes)
    assert [(each.name, each.nodes, each.devices) for each in placed] == [
        ("prefill-0", ("a",), (0, 1)),
        ("prefill-1", ("a",), (2, 3)),
        ("decode-0", ("b", "c"), (0, 1, 2, 3)),
        ("encode-0", ("d",), (0,)),
    ]
    # One context and three generation engines of four GPUs on nodes of four: ctx + gen x ceil(tp / tasks per node).
    assert node_count([SlurmGroup("prefill", 1, 4), SlurmGroup("decode", 3, 4)], 4) == 4
    assert node_count([SlurmGroup("prefill", 1, 4), SlurmGroup("decode", 2, 16)], 4) == 1 + 2 * 4
    with pytest.raises(BadAllocation, match="a decode worker of 6 GPUs does not fill nodes of 4"):
        node_count([SlurmGroup("decode", 1, 6)], 4)


def test_too_few_tasks_name_what_is_missing() -> None:
    with pytest.raises(BadAllocation) as refused:
        place(
            [SlurmGroup("prefill", 1, 4), SlurmGroup("decode", 3, 4)],
            [SlurmNode("a", 4), SlurmNode("b", 4), SlurmNode("c", 4)],
        )
    assert "1 x prefill of 4 and 3 x decode of 4 need 16 tasks, and the allocation has 12" in str(refused.value)
    assert "--nodes" in str(refused.value)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=4),
    st.sampled_from([2, 4, 8]),
)
def test_what_is_counted_is_enough_and_no_gpu_is_given_twice(sizes: list[tuple[int, int]], per_node: int) -> None:
    groups = [SlurmGroup("decode", number, size) for number, size in sizes]
    nodes = [SlurmNode(f"n{index}", per_node) for index in range(node_count(groups, per_node))]
    placed = place(groups, nodes)
    used = Counter((node, device) for each in placed for node in each.nodes for device in each.devices)
    assert max(used.values()) == 1
    assert sum(used.values()) == sum(number * size for number, size in sizes)
    assert {node for node, _ in used} == {node.name for node in nodes}
