"""What the tiering agent prints for Kubernetes, systemd and Grafana, as far as it can be checked without these."""

import copy
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import warnings

import kubernetes_validate
import pytest
import yaml

SHARE = pathlib.Path(__file__).parents[2] / "crates/agent/share"
MANIFEST = SHARE / "daemonset.yaml"
POLDER = pathlib.Path(sys.prefix) / "bin/polder"
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


def test_every_folder_that_the_agent_writes_by_default_is_a_mount_of_the_host() -> None:
    spec = documents()["DaemonSet"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    of_host = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
    mounts = {
        mount["mountPath"]
        for mount in container["volumeMounts"]
        if mount["name"] in of_host and not mount.get("readOnly")
    }
    words = [*container["command"][1:], "--help"]
    text = subprocess.run([POLDER, *words], capture_output=True, text=True, check=True).stdout
    written = [pathlib.Path(path) for path in re.findall(r"\[default:\s+(/\S+\.(?:journal|state))\]", text)]
    assert len(written) == 2
    assert {str(path.parent) for path in written} <= mounts


def verified(unit: str, folder: pathlib.Path) -> str:
    """What systemd finds wrong in a unit. This machine has its command."""
    path = folder / "polder-agent.service"
    path.write_text(unit.replace("/usr/local/bin/polder", str(POLDER)))
    words = ["systemd-analyze", "verify", "--man=no", path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr + ("" if done.returncode == 0 else f"exit status {done.returncode}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_in_the_unit_and_finds_a_wrong_key(tmp_path: pathlib.Path) -> None:
    unit = (SHARE / "polder-agent.service").read_text()
    assert verified(unit, tmp_path) == ""
    assert "RestrictRealtim" in verified(unit.replace("RestrictRealtime", "RestrictRealtim"), tmp_path)
    assert "not executable" in verified(unit.replace("/usr/local/bin/polder agent run", "/nowhere"), tmp_path)


def unknown(found: object, known: object, at: str = "") -> list[str]:
    """Places of what `found` has and `known` has not, or has otherwise."""
    if isinstance(found, dict) and isinstance(known, dict):
        return [it for key in found for it in unknown(found[key], known.get(key), f"{at}.{key}")]
    if isinstance(found, list) and isinstance(known, list) and len(found) == len(known):
        return [
            it for index, pair in enumerate(zip(found, known, strict=True)) for it in unknown(*pair, f"{at}[{index}]")
        ]
    return [] if found == known else [at]


def as_grafana_knows_it(dashboard: dict) -> dict:
    """A dashboard by way of Grafana's own types, which keep no key that they do not know."""
    with warnings.catch_warnings():
        # Grafana advises its next form of dashboards, which versions in use do not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models.dashboard import Dashboard

        register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(copy.deepcopy(dashboard)), cls=JSONEncoder))


def test_grafana_s_types_have_every_key_of_the_dashboard_and_lack_wrong_ones() -> None:
    dashboard = json.loads((SHARE / "grafana.json").read_text())
    assert len(dashboard["panels"]) >= 8
    assert unknown(dashboard, as_grafana_knows_it(dashboard)) == []
    wrong = copy.deepcopy(dashboard)
    panel, variable = wrong["panels"][0], wrong["templating"]["list"][0]
    for part in (panel, panel["targets"][0], panel["fieldConfig"]["defaults"], variable, wrong):
        part["none_of_grafana"] = 1
    places = [".panels[0]", ".panels[0].targets[0]", ".panels[0].fieldConfig.defaults", ".templating.list[0]", ""]
    assert sorted(unknown(wrong, as_grafana_knows_it(wrong))) == sorted(f"{it}.none_of_grafana" for it in places)
