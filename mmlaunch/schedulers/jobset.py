"""A plan's run as a JobSet for Kubernetes."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import PurePosixPath
from typing import Any

from mmlaunch.launch.hosts import SECRET
from mmlaunch.schedulers.job import SAVED, SchedulerJob

_PORT = 29400
# Names of parts, of which Kubernetes makes the pods' own.
_ROLE = "node"
_CONTAINER = "mmlaunch"
# A pod's name has 63 characters; the rest is "-node-0-", its number and five random ones.
_MOST_NAME = 40
# Read as something else than text, of words that are longer than three letters.
_NO_WORDS = {"true", "false", "null"}


def jobset_manifest(
    job: SchedulerJob,
    *,
    image: str,
    claim: str,
    mount: PurePosixPath,
    grace_s: int,
    max_restarts: int,
    secret: str | None = None,
) -> str:
    """The text of a manifest for ``kubectl apply``.

    One pod a node. Pod 0 serves the rendezvous, under its name in the set's headless service.
    A set whose pods have saved, or were moved by Kubernetes, starts again and is not counted.

    Args:
        job: with paths relative to ``mount``.
        image: with mmlaunch and the workload's packages.
        claim: of the volume that all pods share; it has the plan, and gets the run's folder.
        mount: where pods find it; they start there.
        grace_s: seconds that pods have to save, and to end.
        max_restarts: how often the set starts again after other failures.
        secret: a Secret whose key ``secret`` is that of the rendezvous; None: "NAME-secret".

    Source:
        https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2; pod failure policy:
        https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy.
    """
    name = _label(job.name)
    host = f"{name}-{_ROLE}-0-0.{name}"
    script = job.script(node_rank='"$JOB_COMPLETION_INDEX"', endpoint=f"{host}:{_PORT}")
    resource = "cpu" if job.on_cpu else "nvidia.com/gpu"
    fail = {"action": "FailJob"}
    condition = {"type": "DisruptionTarget", "status": "True"}
    exit_codes = {"containerName": _CONTAINER, "operator": "In", "values": [SAVED]}
    key = {"name": secret or f"{name}-secret", "key": "secret"}
    rendezvous = {
        "env": [{"name": SECRET, "valueFrom": {"secretKeyRef": key}}],
        "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
    }
    container = {
        "name": _CONTAINER,
        "image": image,
        # It becomes the launcher, which so is the process that gets the pod's SIGTERM.
        "command": ["bash", "-c", "\n".join(script) + "\n"],
        "workingDir": str(mount),
        **(rendezvous if job.nodes > 1 else {}),
        "resources": {"limits": {resource: job.devices_per_node}},
        "volumeMounts": [
            {"name": "shared", "mountPath": str(mount)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            # Loading processes pass samples there; a container's own has 64 MB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {**fail, "onExitCodes": exit_codes},
                {**fail, "onPodConditions": [condition]},
            ]
        },
        "template": {"spec": pod},
    }
    again = {
        "name": "saved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": max_restarts, "rules": [again]},
            # Pods find each other before they are ready: a rendezvous comes first.
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": name,
            },
            "replicatedJobs": [{"name": _ROLE, "replicas": 1, "template": {"spec": template}}],
        },
    }
    return _yaml(manifest)


def _label(name: str) -> str:
    """As Kubernetes names objects: small letters, digits and dashes, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_MOST_NAME].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")


def _yaml(document: dict[str, Any]) -> str:
    """YAML that versions 1.1 and 1.2 read alike: what might be a switch or a number is quoted."""
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    def styled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: styled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [styled(item) for item in value]
        if not isinstance(value, str):
            return value
        if "\n" in value:
            return LiteralScalarString(value)
        plain = re.fullmatch(r"[A-Za-z/][\w./-]{3,}", value) and value.lower() not in _NO_WORDS
        return value if plain else DoubleQuotedScalarString(value)

    writer = YAML()
    writer.default_flow_style = False
    writer.width = 1000
    text = StringIO()
    writer.dump(styled(document), text)
    return text.getvalue()
