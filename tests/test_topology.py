"""The picture of the plan on the cluster."""

from __future__ import annotations

from pathlib import Path

from mmplan.reporting.sections.topology import topology_section
from mmplan.reporting.source import load_source
from mmplan.schema.base import save_document
from tests.pages import Page
from tests.programs import loss, make_plan, unit


def test_a_slice_of_a_module_is_not_called_the_whole(tmp_path: Path) -> None:
    plan = make_plan(
        unit("vision", name="vision.0", cuts=[(0, 2)], blocks=3, kind="wave"),
        unit("vision", name="vision.1", cuts=[(2, 3)], blocks=3, kind="wave"),
        unit("text", blocks=2, kind="wave"),
        losses=[loss("clip", "vision", "text", sync_batch=2)],
        batch=2,
    )
    save_document(plan, tmp_path / "plan.json")
    words = Page(topology_section(load_source(tmp_path / "plan.json"))).words
    assert "blocks [0, 2)" in words
    assert words.count("whole module") == 1
    assert any("vision.1 (blocks [2, 3)), replica 1 of 1" in w for w in words)
