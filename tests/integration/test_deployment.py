"""The files in `deploy/` pass the linters and schemas of the tools that read them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tinkex.server.config_sources import FIELDS, variable_name

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
BIN = Path(sys.executable).parent
BLOBS = "blobs=s3://bucket/prefix"


def run(tool: str, *args: str | Path) -> str:
    done = subprocess.run(
        [BIN / tool, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dockerfile_passes_hadolint() -> None:
    run("hadolint", "--config", DEPLOY / "hadolint.yaml", DEPLOY / "Dockerfile")


def test_image_installs_extras_of_this_project() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [extras] = re.findall(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_compose_file_matches_compose_specification() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_compose_variables_are_settings() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    environment = services["api"]["environment"] | services["worker"]["environment"]
    names = {name for name in environment if name.startswith("TINKEX_")}
    assert names <= {variable_name(field) for field in FIELDS}
    assert {"TINKEX_STORE", "TINKEX_BLOBS", "TINKEX_SERVER_API_KEY"} <= names


def test_example_environment_sets_required_variables_of_compose() -> None:
    required = re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose.yaml").read_text())
    given = re.findall(r"^(\w+)=.+$", (DEPLOY / "compose.env.example").read_text(), re.MULTILINE)
    assert set(required) <= set(given)


def test_chart_passes_helm_lint() -> None:
    run("helm", "lint", "--strict", "--quiet", CHART, "--set", BLOBS)


def test_chart_requires_object_store() -> None:
    done = subprocess.run(
        [BIN / "helm", "template", "lab", CHART], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "set blobs to the URL of the object store" in done.stderr


def render(*settings: str) -> list[dict[str, Any]]:
    flags = [part for setting in (BLOBS, *settings) for part in ("--set", setting)]
    text = run("helm", "template", "lab", CHART, *flags)
    return [document for document in yaml.safe_load_all(text) if document]


def as_builtin_kinds(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document, or the pods of a RayCluster, whose schema Kubernetes does not have."""
    if document["kind"] != "RayCluster":
        yield document
        return
    spec = document["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", **group["template"]}


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("ray.enabled=true", "workers=null"),
        (
            "modelsVolume.persistentVolumeClaim.claimName=models",
            "models={a=/models/a,b=/models/b}",
            "env.TINKEX_DTYPE=bfloat16",
            "workers[0].args={--ranks,2}",
            "workers[0].name=gpu",
            "workers[0].replicas=1",
            "workers[0].nodeSelector.gpu=h100",
        ),
    ],
    ids=["defaults", "ray", "all-values"],
)
def test_rendered_chart_matches_kubernetes_schemas(settings: tuple[str, ...]) -> None:
    documents = [kind for document in render(*settings) for kind in as_builtin_kinds(document)]
    assert len(documents) >= 4
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_ray_cluster_matches_ray_in_the_image() -> None:
    [cluster] = [one for one in render("ray.enabled=true") if one["kind"] == "RayCluster"]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]
    )
    assert cluster["spec"]["rayVersion"] == pins["ray"]
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
