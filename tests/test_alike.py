"""Classes of components and nodes: split where their transfers differ, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.program.symmetry_classes import refine_classes


def test_components_inside_a_node_are_equivalent_wherever_they_are() -> None:
    found = refine_classes(["a"] * 4, [[0, 0], [0, 0], [1, 1], [2, 2]], [])
    assert found.component_class == [0, 0, 0, 0]
    assert found.multiplicities(0) == [0, 0]  # they send over no interface


def test_nodes_shared_by_more_components_make_other_classes() -> None:
    # Two components send from node 0 to nodes 1 and 2; one alone from node 3 to node 4.
    found = refine_classes(["a"] * 3, [[0, 1], [0, 2], [3, 4]], [])
    assert found.component_class == [0, 0, 1]
    assert found.node_class == [0, 1, 1, 2, 3]
    assert [found.multiplicities(component) for component in range(3)] == [[2, 1], [2, 1], [1, 1]]


def test_what_is_next_to_something_else_is_something_else() -> None:
    # A chain of components over shared nodes: both ends equivalent, and so on inwards.
    found = refine_classes(["a"] * 5, [[i, i + 1, i] for i in range(5)], [])
    assert len(set(found.component_class)) == 5  # a direction: sends and receives differ
    ring = refine_classes(["a"] * 5, [[i, (i + 1) % 5] for i in range(5)], [])
    assert set(ring.component_class) == {0}
    assert ring.multiplicities(3) == [1, 1]


def test_a_reduction_that_only_some_nodes_take_part_in_tells_them_apart() -> None:
    nodes = [[0, 1], [2, 3], [4, 5]]
    assert refine_classes(["a"] * 3, nodes, [set(range(6))]).component_class == [0, 0, 0]
    assert refine_classes(["a"] * 3, nodes, [{0, 2}]).component_class == [0, 0, 1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 4), min_size=1, max_size=3))),
    st.lists(st.sets(st.integers(0, 4), min_size=2), max_size=2),
)
def test_equivalence_holds_for_the_neighbours_too(
    components: list[tuple[str, list[int]]], collectives: list[set[int]]
) -> None:
    """Components of a class see equal nodes and loads; nodes of a class carry equal components."""
    shapes, nodes = [shape for shape, _ in components], [own for _, own in components]
    found = refine_classes(shapes, nodes, collectives)
    seen: dict[int, object] = {}
    for component, own in enumerate(found.component_class):
        sends = len(set(nodes[component])) > 1
        around = [found.node_class[node] for node in nodes[component]] if sends else None
        said = (
            shapes[component],
            found.multiplicities(component),
            around,
            [p for _, p in found.slots[component]],
        )
        assert seen.setdefault(own, said) == said
    there: dict[int, object] = {}
    for node, own in enumerate(found.node_class):
        carries = sorted(
            (found.component_class[component], slot)
            for component, slots in enumerate(found.slots)
            if len(set(nodes[component])) > 1
            for n, slot in dict.fromkeys(slots)
            if n == node
        )
        said = carries, [node in members for members in collectives]
        assert there.setdefault(own, said) == said
