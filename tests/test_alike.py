"""Kinds of parts and nodes: split where what they carry differs, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.simulation.node_symmetry import find_alike


def test_parts_inside_a_node_are_alike_wherever_they_are() -> None:
    found = find_alike(["a"] * 4, [[0, 0], [0, 0], [1, 1], [2, 2]], [])
    assert found.part_kind == [0, 0, 0, 0]
    assert found.loads(0) == [0, 0]  # they send over no interface


def test_nodes_shared_by_more_parts_make_other_kinds() -> None:
    # Two parts send from node 0 to nodes 1 and 2; one alone from node 3 to node 4.
    found = find_alike(["a"] * 3, [[0, 1], [0, 2], [3, 4]], [])
    assert found.part_kind == [0, 0, 1]
    assert found.node_kind == [0, 1, 1, 2, 3]
    assert [found.loads(part) for part in range(3)] == [[2, 1], [2, 1], [1, 1]]


def test_what_is_next_to_something_else_is_something_else() -> None:
    # A chain of parts over shared nodes: both ends alike, and so on inwards.
    found = find_alike(["a"] * 5, [[i, i + 1, i] for i in range(5)], [])
    assert len(set(found.part_kind)) == 5  # a direction: sends and receives differ
    ring = find_alike(["a"] * 5, [[i, (i + 1) % 5] for i in range(5)], [])
    assert set(ring.part_kind) == {0}
    assert ring.loads(3) == [1, 1]


def test_a_reduction_that_only_some_nodes_take_part_in_tells_them_apart() -> None:
    nodes = [[0, 1], [2, 3], [4, 5]]
    assert find_alike(["a"] * 3, nodes, [set(range(6))]).part_kind == [0, 0, 0]
    assert find_alike(["a"] * 3, nodes, [{0, 2}]).part_kind == [0, 0, 1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 4), min_size=1, max_size=3))),
    st.lists(st.sets(st.integers(0, 4), min_size=2), max_size=2),
)
def test_alike_means_alike_around(
    parts: list[tuple[str, list[int]]], meetings: list[set[int]]
) -> None:
    """Parts of one kind see the same kinds of nodes and loads; nodes of one kind the same parts."""
    shapes, nodes = [shape for shape, _ in parts], [own for _, own in parts]
    found = find_alike(shapes, nodes, meetings)
    seen: dict[int, object] = {}
    for part, kind in enumerate(found.part_kind):
        sends = len(set(nodes[part])) > 1
        around = [found.node_kind[node] for node in nodes[part]] if sends else None
        said = shapes[part], found.loads(part), around, [p for _, p in found.places[part]]
        assert seen.setdefault(kind, said) == said
    there: dict[int, object] = {}
    for node, kind in enumerate(found.node_kind):
        carries = sorted(
            (found.part_kind[part], place)
            for part, own in enumerate(found.places)
            if len(set(nodes[part])) > 1
            for n, place in dict.fromkeys(own)
            if n == node
        )
        said = carries, [node in meeting for meeting in meetings]
        assert there.setdefault(kind, said) == said
