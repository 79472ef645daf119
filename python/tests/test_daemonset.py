"""The manifest of the tiering agent for Kubernetes, as far as it can be checked without a cluster: against schemas."""

import copy
import pathlib
import tomllib

import kubernetes_validate
import pytest
import yaml

MANIFEST = pathlib.Path(__file__).parents[2] / "crates/agent/share/daemonset.yaml"
VERSIONS = ["1.31", "1.34"]


def documents() -> dict[str, dict]:
    """The manifest's objects by their kind."""
    return {it["kind"]: it for it in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_follows_the_schema_and_a_wrong_one_does_not(version: str) -> None:
    for document in documents().values():
        kubernetes_validate.validate(document, version, strict=True)
    wrong = copy.deepcopy(documents()["DaemonSet"])
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_what_is_mounted_is_there_and_the_policy_is_one_file() -> None:
    by_kind = documents()
    spec = by_kind["DaemonSet"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    mounts = {it["name"]: it for it in container["volumeMounts"]}
    assert mounts.keys() == {it["name"] for it in spec["volumes"]}
    assert by_kind["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= (
        by_kind["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()
    )
    policy = mounts["policy"]
    assert policy["mountPath"] in container["args"]
    assert tomllib.loads(by_kind["ConfigMap"]["data"][policy["subPath"]])["service"]
