"""Checks manifests against the real schemas: `schemas.py FILE...` prints a line for each object; exit code 1 if one is bad.

Core objects: Kubernetes' own JSON schemas (package kubernetes-validate). JobSet, TrainJob and runtimes: Kubeflow's models.
MPIJob: its CRD is in no package, so its fields are listed here as the CRD v2beta1 has them (docs/decisions/kubernetes.md), and its pod
templates, which are half a megabyte of it, are checked as what they are: PodTemplateSpecs of Kubernetes.
Runs in .venv/engines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

KUBERNETES = "1.33"
MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
}
TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others: the API server would prune what it does not know, without a word."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


RESTART = {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}
REPLICA = closed({"replicas": WHOLE, "restartPolicy": RESTART, "template": {"type": "object"}}, "template")
MPI_JOB = closed(
    {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "mpiReplicaSpecs": closed({"Launcher": REPLICA, "Worker": REPLICA}, "Launcher"),
                "runLauncherAsWorker": FLAG,
                "runPolicy": closed(
                    {
                        "activeDeadlineSeconds": WHOLE,
                        "backoffLimit": WHOLE,
                        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                        "managedBy": TEXT,
                        "schedulingPolicy": closed(
                            {
                                "minAvailable": WHOLE,
                                "minResources": {"type": "object"},
                                "priorityClass": TEXT,
                                "queue": TEXT,
                                "scheduleTimeoutSeconds": WHOLE,
                            }
                        ),
                        "suspend": FLAG,
                        "ttlSecondsAfterFinished": WHOLE,
                    }
                ),
                "slotsPerWorker": WHOLE,
                "sshAuthMountPath": TEXT,
            },
            "mpiReplicaSpecs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)


def pod_of(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}


def unknown(given: Any, known: Any, path: str) -> list[str]:
    """What the model has dropped: its fields are optional, and it ignores what it does not know."""
    if isinstance(given, dict) and isinstance(known, dict):
        found = [f"{path}.{key}" for key in given if key not in known]
        return found + [
            one for key in given if key in known for one in unknown(given[key], known[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(known, list):
        return [one for a, b in zip(given, known, strict=False) for one in unknown(a, b, f"{path}[]")]
    return []


def trouble(document: dict[str, Any]) -> str:
    """Empty: it is valid."""
    key = document["apiVersion"], document["kind"]
    try:
        if key in MODELS:
            model = MODELS[key].from_dict(document)
            lost = unknown(document, model.to_dict(), document["kind"])
            return f"unknown fields: {', '.join(lost)}" if lost else ""
        if key == ("kubeflow.org/v2beta1", "MPIJob"):
            jsonschema.validate(document, MPI_JOB)
            for replica in document["spec"]["mpiReplicaSpecs"].values():
                kubernetes_validate.validate(pod_of(replica["template"]), KUBERNETES, strict=True)
            return ""
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError, ValueError) as error:
        return " ".join(str(error).split())[:500]
    return ""


def main(paths: list[str]) -> int:
    code = 0
    for path in paths:
        for document in yaml.safe_load_all(Path(path).read_text()):
            said = trouble(document)
            print(Path(path).name, document["apiVersion"], document["kind"], said or "valid")
            code |= bool(said)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
