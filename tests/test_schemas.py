"""docs/schemas are what the models say; ``make golden`` rewrites them."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mmplan.schema.cluster import load_cluster, shipped_clusters

DOCS = Path(__file__).parent.parent / "docs"


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["workload", "cluster", "profile", "plan"])
def test_golden_schemas(kind: str) -> None:
    module = generator()
    (model,) = [model for model in module.MODELS if model.kind == kind]
    kept = (DOCS / "schemas" / f"{kind}.json").read_text(encoding="utf-8")
    assert kept == module.schema_text(model)


def test_there_is_a_schema_for_every_file_and_no_other() -> None:
    kinds = {f"{model.kind}.json" for model in generator().MODELS}
    assert {path.name for path in (DOCS / "schemas").iterdir()} == kinds


@pytest.mark.parametrize("name", sorted(shipped_clusters()))
def test_shipped_clusters_load_and_fit_their_schema(name: str) -> None:
    cluster = load_cluster(name)
    schema: dict[str, Any] = json.loads((DOCS / "schemas" / "cluster.json").read_text())
    assert set(cluster.model_dump(exclude_none=True)) <= schema["properties"].keys()
    assert set(schema["required"]) <= cluster.model_dump(exclude_none=True).keys()
