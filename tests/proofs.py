"""Workloads that plans were made for, as parsed files, and certificates of the two."""

from __future__ import annotations

import json
from typing import Any

from mmplan.proof.certificate import make_certificate
from mmplan.proof.checker import check_certificate
from mmplan.schema.base import document_text
from mmplan.schema.plan import Plan

Json = dict[str, Any]


def plan_document(plan: Plan) -> Json:
    """A plan's file, parsed."""
    return json.loads(document_text(plan))


def workload_of(plan: Plan) -> Json:
    """The workload's file that a hand-made plan stands for."""
    modules: Json = {}
    losses: Json = {}
    tasks: Json = {}
    for name, task in plan.tasks.items():
        for module, planned in task.modules.items():
            share = {"share": planned.share} if planned.share else {}
            own = {"factory": "f:m", "inputs": list(planned.inputs), **share}
            modules.setdefault(planned.share or module, {"factory": "f:m", "inputs": [None]})
            modules[module] = own
        for loss, item in task.losses.items():
            own = {"factory": "f:l", "inputs": list(item.inputs), "weight": item.weight}
            cross = {"cross_sample": True, "sync_batch": item.sync_batch}
            losses[loss] = own | (cross if item.sync_batch else {})
        parts = {**task.modules, **task.losses}
        tasks[name] = {
            "modules": list(task.modules),
            "losses": list(task.losses),
            "batch": task.batch,
            "weight": task.weight,
            "inputs": {part: list(item.inputs) for part, item in parts.items()},
            "frozen": {
                module: planned.frozen if planned.frozen is True else list(planned.frozen or ())
                for module, planned in task.modules.items()
            },
        }
    parsed = {"name": plan.name, "batch": 1, "modules": modules, "losses": losses, "tasks": tasks}
    return json.loads(json.dumps(parsed))


def certified(plan: Plan, workload: Json | None = None) -> Json:
    """A plan's certificate as a file has it."""
    made = make_certificate(plan, plan_document(plan), workload or workload_of(plan))
    return json.loads(json.dumps(made))


def faults_of(plan: Plan, certificate: Json, workload: Json | None = None) -> list[str]:
    """The faults that the independent checker finds."""
    return check_certificate(workload or workload_of(plan), plan_document(plan), certificate)
