"""Write the JSON Schemas of the files from the models; ``make golden`` runs it."""

from __future__ import annotations

import json
from pathlib import Path

from mmplan.schema.base import Document
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload

SCHEMAS = Path(__file__).parent / "schemas"
MODELS: tuple[type[Document], ...] = (Workload, Cluster, Profile, Plan)


def schema_text(model: type[Document]) -> str:
    """The schema of one file as it is kept in docs/schemas."""
    return json.dumps(model.model_json_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for model in MODELS:
        (SCHEMAS / f"{model.kind}.json").write_text(schema_text(model), encoding="utf-8")
