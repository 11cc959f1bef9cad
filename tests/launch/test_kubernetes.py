"""launch/k8s/: each manifest is valid by the published schemas, and its pods are real processes on test
hosts.
"""

import contextlib
import copy
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.launch.hosts import ROOT, Host, Running, environment, hosts
from tests.launch.kits import check_trained, shrunk

RUNS = ("k8s/job", "k8s/job-tpu", "k8s/jobset", "k8s/jobset-tpu")
WITH_RAY = "ray/kuberay"
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
KINDS = {
    "Service": "core.v1.Service",
    "ConfigMap": "core.v1.ConfigMap",
    "Job": "batch.v1.Job",
    "JobSet": "jobset.v1alpha2.JobSet",
    "RayCluster": "ray.v1.RayCluster",
}


def text_of(name: str) -> str:
    """Text of a manifest of launch/."""
    return (ROOT / "launch" / f"{name}.yaml").read_text()


def documents(name: str) -> dict[str, Any]:
    """Objects of a manifest of launch/ by kind."""
    found = {one["kind"]: one for one in yaml.safe_load_all(text_of(name))}
    assert set(found) <= set(KINDS)
    return found


def job_of(name: str) -> tuple[dict[str, Any], str, int]:
    """Spec of the Job of a manifest, what its pods' names begin with, and the number of such Jobs."""
    found = documents(name)
    if "Job" in found:
        return found["Job"]["spec"], found["Job"]["metadata"]["name"], 1
    (jobs,) = found["JobSet"]["spec"]["replicatedJobs"]
    return jobs["template"]["spec"], f"{found['JobSet']['metadata']['name']}-{jobs['name']}", jobs["replicas"]


def check(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA | {"$ref": f"#/$defs/{KINDS[document['kind']]}"}).validate(
        document
    )


@pytest.mark.parametrize("name", ["k8s/settings", *RUNS, WITH_RAY])
def test_a_manifest_is_valid_and_short(name: str) -> None:
    for document in documents(name).values():
        check(document)
        wrong = copy.deepcopy(document)
        (wrong["data"] if "data" in wrong else wrong["spec"])["misspelt"] = {"a": 1}
        with pytest.raises(jsonschema.ValidationError, match=r"misspelt|not of type"):
            check(wrong)
    assert len(text_of(name).splitlines()) <= 60


@pytest.mark.parametrize("name", RUNS)
def test_numbers_and_names_of_a_manifest_fit_together(name: str) -> None:
    """As many pods as processes, the first of them the coordinator, a service with that name, and room in
    /dev/shm.
    """
    job, _, jobs = job_of(name)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    first = pods(name)[0]
    assert first.environ["JTRAIN_COORDINATOR"] == f"{first.name}:1234"
    assert len(pods(name)) == jobs * job["completions"]
    template = job["template"]
    if "Service" in (found := documents(name)):
        service = found["Service"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert service["metadata"]["name"] == template["spec"]["subdomain"]
    else:
        assert found["JobSet"]["spec"]["network"] == {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
        }
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert ("google.com/tpu" in container["resources"]["limits"]) == name.endswith("tpu")
    assert template["spec"]["terminationGracePeriodSeconds"] >= 300, "a save takes time"


def verdict(job: dict[str, Any], code: int, *, disrupted: bool = False) -> str:
    """Action of a Job's pod failure policy: that of the first rule that fits, else a failure that counts."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None:
            (container,) = job["template"]["spec"]["containers"]
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
        if (codes is not None and code in codes["values"]) or (disrupted and "onPodConditions" in rule):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("name", RUNS)
def test_a_pod_that_saved_comes_again_and_others_count(name: str) -> None:
    """75 and 143 never count, 2 is final, and others count up to a limit: 77 is not tried again for ever. In a
    JobSet they start all pods anew.
    """
    job, _, _ = job_of(name)
    jobset = "jobset" in name
    assert [verdict(job, code) for code in (75, 143, 76, 77, 1, 137)] == [
        "Ignore",
        "Ignore",
        "Count",
        "Count",
        "Count",
        "Count",
    ]
    assert verdict(job, 75, disrupted=True) == "Ignore"
    assert verdict(job, 2) == "FailJob"
    assert verdict(job, 137, disrupted=True) == ("Count" if jobset else "Ignore")
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy allows no other"
    assert (job["backoffLimit"] == 0) == jobset
    if jobset:
        policy = documents(name)["JobSet"]["spec"]["failurePolicy"]
        assert policy["maxRestarts"] > 0
        assert policy["rules"] == [
            {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ]


class Pod:
    """One pod of a manifest.

    name: by which others reach it.
    command: of its container, without the arguments.
    environ: variables of its container, from the config map, values and annotations.
    """

    def __init__(self, name: str, container: dict[str, Any], annotations: dict[str, str]) -> None:
        self.name, self.container, self.command = name, container, container["command"]
        self.environ: dict[str, str] = {}
        for source in container["envFrom"]:
            settings = documents("k8s/settings")["ConfigMap"]
            assert source["configMapRef"]["name"] == settings["metadata"]["name"]
            self.environ |= settings["data"]
        for one in container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            self.environ[one["name"]] = one["value"] if "value" in one else annotations[field]


def pods(name: str) -> list[Pod]:
    """Pods of a manifest in the order of their processes, with the names and annotations that Kubernetes
    gives them.
    """
    job, prefix, jobs = job_of(name)
    (container,) = job["template"]["spec"]["containers"]
    found = []
    for number in range(jobs):
        for index in range(job["completions"]):
            annotations = {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
                "metadata.annotations['jobset.sigs.k8s.io/job-index']": str(number),
            }
            host = f"{prefix}-{number}-{index}" if "jobset" in name else f"{prefix}-{index}"
            found.append(Pod(f"{host}.jtrain", container, annotations))
    return found


@contextlib.contextmanager
def running(name: str, folder: Path, *arguments: str) -> Iterator[list[tuple[Running, Host, dict[str, str]]]]:
    """Context in which the pods of a manifest run with other arguments, each on a host of its own."""
    mine = pods(name)
    with hosts(len(mine), folder, names=[pod.name for pod in mine]) as nodes:
        environs, port = [], free_port(nodes[0].address)
        for number, (pod, host) in enumerate(zip(mine, nodes, strict=True)):
            environ = environment(**pod.environ)
            programs = [str(Path(sys.executable).parent), environ["PATH"]]
            # Without namespaces no host has a name: all are addresses, and getent finds them.
            if not host.enter:
                (folder / "getent").write_text("#!/bin/sh\n")
                (folder / "getent").chmod(0o755)
                programs.insert(0, str(folder))
                environ["JTRAIN_COORDINATOR"] = f"{nodes[0].address}:{port}"
            environ["PATH"] = ":".join(programs)
            # Each pod has a /tmp of its own.
            environ["JTRAIN_HEARTBEAT_FILE"] = str(folder / f"heartbeat-{number}")
            environs.append(environ)
        runs = [
            host.start([*pod.command, *arguments], environ)
            for pod, host, environ in zip(mine, nodes, environs, strict=True)
        ]
        try:
            yield list(zip(runs, nodes, environs, strict=True))
        finally:
            for run in runs:
                run.close()


def free_port(address: str) -> int:
    """Returns a port that nobody uses there; where the address is in a namespace, any port."""
    with socket.socket() as free:
        free.bind((address if address.startswith("127.") else "", 0))
        return free.getsockname()[1]


def probe(pod: Pod, environ: dict[str, str]) -> int:
    """Runs the command of the liveness probe; returns its exit code."""
    assert pod.container["startupProbe"]["exec"] == pod.container["livenessProbe"]["exec"]
    command = pod.container["livenessProbe"]["exec"]["command"]
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode


@pytest.mark.parametrize("dry", [(), pytest.param(("--dry-run",), marks=pytest.mark.slow)], ids=["", "dry"])
def test_pods_join_and_a_mesh_that_does_not_fit_is_refused(dry: tuple[str, ...], tmp_path: Path) -> None:
    """Two processes of one device each find each other by the names of their pods, and count two devices, not
    four; a dry run too.
    """
    arguments = ("--config=tiny", "--emulate-devices", "1", "--set", "mesh.data=4", *dry)
    with running("k8s/job", tmp_path, *arguments, "--workdir", str(tmp_path / "run")) as started:
        codes = [run.end() for run, _, _ in started]
        for (run, _, environ), pod in zip(started, pods("k8s/job"), strict=True):
            assert re.search("2 (devices )?are here", run.output), run.output
            # A dry run has no supervisor.
            assert probe(pod, environ) == bool(dry), "the supervisor has touched the file"
            assert probe(pod, environ | {"JTRAIN_HEARTBEAT_FILE": str(tmp_path / "none")}) == 1
    assert codes == [2, 2]


def test_a_heartbeat_that_is_old_is_no_sign_of_life(tmp_path: Path) -> None:
    """Five minutes: longer than any pause in which the supervisor waits for the other hosts."""
    file = tmp_path / "heartbeat"
    file.touch()
    environ = environment(JTRAIN_HEARTBEAT_FILE=str(file))
    for pod in [pods(name)[0] for name in RUNS]:
        assert probe(pod, environ) == 0
    subprocess.run(["touch", "--date=6 minutes ago", str(file)], check=True)
    for pod in [pods(name)[0] for name in RUNS]:
        assert probe(pod, environ) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_pods_train(name: str, tmp_path: Path) -> None:
    """The whole of each manifest with its own arguments, two or four pods with as many devices as it asks for."""
    container = pods(name)[0].container
    limits = container["resources"]["limits"]
    (devices,) = [limits[resource] for resource in ("nvidia.com/gpu", "google.com/tpu") if resource in limits]
    options = shrunk(devices, tmp_path / "run")
    with running(name, tmp_path, *container["args"], *options) as started:
        codes = [run.end() for run, _, _ in started]
        assert codes == [0] * len(started), [run.output for run, _, _ in started]
        check_trained(tmp_path / "run", started[0][0].output, devices=devices * len(started))


def test_the_ray_cluster_has_the_version_of_the_image() -> None:
    """Ray refuses nodes of another version."""
    cluster = documents(WITH_RAY)["RayCluster"]
    assert f"ray=={cluster['spec']['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
