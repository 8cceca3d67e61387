"""Jobs for schedulers: the Slurm script is really run, manifests are held against the fields that the clusters' schemas have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Cluster, Plan
from ascendfactory.launch.order import Order, Volume, read_volumes
from ascendfactory.launch.place import find_place
from ascendfactory.launch.slurm import script
from ascendfactory.launch.submit import prepare, send
from tests.examples import CPU, device, make

DEVICES = {"cpu": CPU, "cuda": device("h100", "cuda"), "npu": device("snt9b23", "npu", 16)}

# The fields that may stand below each mapping that we write: of the CRD of Volcano v1.15.1, those of Kubeflow Trainer v2.3.0 (with
# JobSet v0.12.0), and of Kubernetes v1.36 for what they take over from it. `*` stands for names that are free.
FIELDS: dict[str, str] = {
    "Job": "apiVersion kind metadata spec status",
    "Job.metadata": "name namespace labels annotations",
    "Job.spec": "maxRetry minAvailable minSuccess networkTopology plugins policies priorityClassName queue runningEstimate schedulerName "
    "tasks ttlSecondsAfterFinished volumes",
    "Job.spec.plugins": "env svc ssh pytorch tensorflow mpi ray hcclrank",
    "Job.spec.policies": "action event events exitCode timeout",
    "Job.spec.tasks": "dependsOn maxRetry minAvailable name partitionPolicy policies replicas template topologyPolicy",
    "TrainingRuntime": "apiVersion kind metadata spec",
    "TrainingRuntime.metadata": "name namespace labels annotations",
    "TrainingRuntime.spec": "mlPolicy podGroupPolicy template",
    "TrainingRuntime.spec.mlPolicy": "flux jax mpi numNodes torch xgboost",
    "TrainingRuntime.spec.mlPolicy.torch": "envInjection",
    "TrainingRuntime.spec.template": "metadata spec",
    "TrainingRuntime.spec.template.spec": "coordinator failurePolicy managedBy network replicatedJobs startupPolicy successPolicy suspend "
    "ttlSecondsAfterFinished volumeClaimPolicies",
    "TrainingRuntime.spec.template.spec.failurePolicy": "maxRestarts restartStrategy rules",
    "TrainingRuntime.spec.template.spec.failurePolicy.rules": "action name onJobFailureMessagePatterns onJobFailureReasons "
    "targetReplicatedJobs",
    "TrainingRuntime.spec.template.spec.replicatedJobs": "dependsOn groupName name replicas template",
    "TrainingRuntime.spec.template.spec.replicatedJobs.template": "metadata spec",
    "TrainingRuntime.spec.template.spec.replicatedJobs.template.spec": "activeDeadlineSeconds backoffLimit backoffLimitPerIndex "
    "completionMode completions managedBy manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector "
    "successPolicy suspend template ttlSecondsAfterFinished",
    "podFailurePolicy": "rules",
    "podFailurePolicy.rules": "action onExitCodes onPodConditions",
    "podFailurePolicy.rules.onExitCodes": "containerName operator values",
    "TrainJob": "apiVersion kind metadata spec status",
    "TrainJob.metadata": "name namespace labels annotations",
    "TrainJob.spec": "activeDeadlineSeconds initializer managedBy runtimePatches runtimeRef suspend trainer",
    "TrainJob.spec.runtimeRef": "apiGroup kind name",
    "TrainJob.spec.trainer": "args command env image numNodes numProcPerNode resourcesPerNode",
    "pod": "metadata spec",
    "pod.spec": "affinity containers hostNetwork imagePullSecrets nodeSelector restartPolicy schedulerName serviceAccountName "
    "terminationGracePeriodSeconds tolerations volumes",
    "pod.spec.containers": "args command env image name ports resources volumeMounts workingDir",
    "pod.spec.containers.env": "name value valueFrom",
    "pod.spec.containers.resources": "claims limits requests",
    "pod.spec.containers.volumeMounts": "mountPath name readOnly subPath",
    "pod.spec.volumes": "emptyDir hostPath name persistentVolumeClaim",
    "pod.spec.volumes.persistentVolumeClaim": "claimName readOnly",
    "pod.spec.volumes.emptyDir": "medium sizeLimit",
}
FREE = ("labels", "annotations", "limits", "requests", "nodeSelector")
POD_TEMPLATES = ("Job.spec.tasks.template", "TrainingRuntime.spec.template.spec.replicatedJobs.template.spec.template")
JOB_SPEC = "TrainingRuntime.spec.template.spec.replicatedJobs.template.spec"


def unknown_fields(tree: Any, at: str) -> list[str]:
    """Paths in a manifest that the schema does not have."""
    if isinstance(tree, list):
        return [found for item in tree for found in unknown_fields(item, at)]
    if not isinstance(tree, dict) or at.rpartition(".")[2] in FREE:
        return []
    at = "pod" if at in POD_TEMPLATES else "podFailurePolicy" if at == f"{JOB_SPEC}.podFailurePolicy" else at
    known = "labels annotations" if at.endswith(".metadata") and at not in FIELDS else FIELDS.get(at, "")
    return [
        found
        for key, value in tree.items()
        for found in ([] if key in known.split() else [f"{at}.{key}"]) + unknown_fields(value, f"{at}.{key}")
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model and data, where no scheduler is installed."""
    monkeypatch.chdir(tmp_path)
    for name in ("m", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "d.jsonl").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def plan(kind: str = "cuda", *overrides: str, nodes: int = 2, nproc: int = 8, restarts: int = 0, run_dir: str = "runs/r") -> Plan:
    made = make(run_dir, f"--cluster.restarts={restarts}", "--name=r", *overrides, device=DEVICES[kind], nproc=nproc)
    return made.model_copy(update={"cluster": Cluster(device=DEVICES[kind], nodes=nodes, nproc=nproc)})


def program(here: Path, name: str, text: str) -> Path:
    file = here / "bin" / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def refused(match: str, *arguments: Any, **words: Any) -> None:
    """It is refused in these words, and leaves nothing behind."""
    with pytest.raises(UserError, match=match):
        prepare(*arguments, **words)
    assert not Path("runs").exists()


# Slurm


def test_directives_say_what_the_plan_says(here: Path) -> None:
    assert directives(script(Order(plan("cuda"), here))) == [
        "--job-name=r",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        f"--output={here}/runs/r/logs/slurm-%j.out",
        "--open-mode=append",
        "--signal=TERM@300",
        "--gpus-per-node=8",
    ]
    assert directives(script(Order(plan("npu", nproc=16, restarts=1), here)))[-2:] == ["--gres=npu:16", "--requeue"]
    alone = directives(script(Order(plan("cpu", nodes=1, nproc=4), here)))
    assert {"--nodes=1", "--cpus-per-task=4"} < set(alone) and not [line for line in alone if "gpu" in line or "gres" in line]


def test_an_option_takes_the_place_of_ours(here: Path) -> None:
    options = ("-p gpu", "--gres=gpu:h100:8", "-c16", "--signal=TERM@900", "--no-requeue")
    text = script(Order(plan("cuda", restarts=1), here, options))
    assert directives(text)[-5:] == list(options)
    assert not [line for line in directives(text)[:-5] if line.startswith(("--gpus", "--cpus", "--signal", "--requeue"))]
    assert "--gpus-per-node=8" in directives(script(Order(plan("cuda"), here, ("--gres=nvme:1",))))


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("--nodes=4", r"--option: --nodes comes from the plan; set cluster.nodes in the recipe"),
        ("-N4", "set cluster.nodes"),
        ("--ntasks 8", "there is one task a node"),
        ("partition=gpu", r"'partition=gpu' is no option of sbatch; write --option=--partition=gpu"),
        ("--time=1\nrm -r x", "no option of sbatch"),
    ],
)
def test_an_option_that_cannot_be_is_refused(option: str, match: str, here: Path) -> None:
    refused(match, plan(), "slurm", options=[option])


# srun as Slurm has it: the command once a node, the highest exit code; the command notes what it was given and ends as the test says
SRUN = """
echo "$*" >> srun.log
while [ "${1#--}" != "$1" ]; do shift; done
export ATTEMPT=$(wc -l < srun.log)
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do SLURM_NODEID=$i "$@" & pids[i]=$!; done
worst=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; [ "$code" -gt "$worst" ] && worst=$code; done
exit "$worst"
"""
COMMAND = """
echo "$SLURM_NODEID $MASTER_ADDR $MASTER_PORT ${NNODES-none} $PWD" >> "seen-$ATTEMPT.log"
set -- $(sed -n "${ATTEMPT}p" codes)
exit "${@:SLURM_NODEID + 1:1}"
"""


def run_script(here: Path, text: str, *, num_nodes: int = 2) -> subprocess.CompletedProcess[str]:
    program(here, "srun", SRUN)
    program(here, "scontrol", 'echo "$*" >> scontrol.log; echo gpu01; echo gpu02')
    file = here / "script.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    env = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_CPUS_PER_TASK": "64",
        "NNODES": "9",
        "NODE_RANK": "5",
    }
    return subprocess.run(["bash", str(file)], env=env, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("codes", "restarts", "num_attempts", "code"),
    [
        (["0 0"], 3, 1, 0),
        (["1 0", "137 1", "0 0"], 3, 3, 0),
        (["1 1"] * 3, 1, 2, 1),
        (["0 137"] * 2, 0, 1, 137),
        (["2 2"] * 2, 3, 1, 2),
        (["130 0"] * 2, 3, 1, 130),
    ],
)
def test_the_script_tries_again_only_what_can_end_otherwise(
    codes: list[str], restarts: int, num_attempts: int, code: int, here: Path
) -> None:
    (here / "codes").write_text("\n".join(codes) + "\n")
    done = run_script(here, script(Order(plan(restarts=restarts), here), python=str(program(here, "train", COMMAND))))
    assert (done.returncode, done.stderr) == (code, "")
    assert len((here / "srun.log").read_text().splitlines()) == num_attempts
    assert len(done.stdout.splitlines()) == num_attempts - 1
    for attempt in range(1, num_attempts + 1):
        seen = sorted((here / f"seen-{attempt}.log").read_text().splitlines())
        assert seen == [f"{node} gpu01 20246 none {here}" for node in range(2)]  # 20000 + 70123 % 5000 * 2
    assert (here / "scontrol.log").read_text() == "show hostnames gpu[01-02]\n"
    assert (
        f"--kill-on-bad-exit=1 --wait=0 {here}/bin/train -m ascendfactory train {here}/runs/r/plan.json" in (here / "srun.log").read_text()
    )
    assert "--cpus-per-task=64" in (here / "srun.log").read_text()


def test_every_node_of_the_script_finds_its_place(here: Path) -> None:
    root = Path(__file__).parents[2]
    code = "import os; from ascendfactory.launch.place import find_place; p = find_place(os.environ); "
    code += "print(p.rank, p.nodes, p.master_addr, p.master_port)"
    look = program(here, "look", f"PYTHONPATH={root} {sys.executable} -c '{code}'")
    done = run_script(here, script(Order(plan(), here), python=str(look)))
    assert sorted(done.stdout.splitlines()) == ["0 2 gpu01 20246", "1 2 gpu01 20246"]


def test_a_folder_with_blanks_and_quotes_is_quoted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = here / "it's 100% mine"
    odd.mkdir()
    (odd / "codes").write_text("0\n")
    text = script(Order(plan(nodes=1), odd), python=str(program(here, "train", COMMAND)))
    assert run_script(here, text, num_nodes=1).returncode == 0
    assert (odd / "seen-1.log").read_text() == f"0 gpu01 20246 none {odd}\n"
    assert "--output='\"'\"'" not in text and "100%% mine/runs/r/logs/slurm-%j.out" in text


def test_a_file_is_written_and_sent_by_sbatch(here: Path) -> None:
    made = prepare(plan(), "slurm", options=["--partition=gpu"])
    assert (str(made.file), made.command, made.notes) == ("runs/r/job/slurm.sh", ("sbatch", "runs/r/job/slurm.sh"), [])
    assert Plan.model_validate_json((here / "runs/r/plan.json").read_text(), strict=False) == plan()
    assert (here / "runs/r/logs").is_dir()  # Slurm opens its log there before anything runs
    program(here, "sbatch", 'echo "Submitted batch job 7"; echo "$*" > sent')
    assert send(made) == "Submitted batch job 7"
    assert (here / "sent").read_text() == "runs/r/job/slurm.sh\n"


def test_a_scheduler_that_is_missing_or_refuses_is_one_line_and_the_file_stays(here: Path) -> None:
    made = prepare(plan(), "slurm")
    with pytest.raises(
        UserError, match=r"^sbatch: is not on this machine; the file is runs/r/job/slurm.sh: run 'sbatch runs/r/job/slurm.sh' where"
    ):
        send(made)
    program(here, "sbatch", 'echo "sbatch: error: invalid partition" >&2; echo "Batch job submission failed" >&2; exit 1')
    with pytest.raises(UserError, match=r"^sbatch: refused .*: sbatch: error: invalid partition Batch job submission failed$"):
        send(made)
    assert made.file.exists()


# Kubernetes


def manifests(to: str, made: Plan, here: Path, *options: str) -> list[dict[str, Any]]:
    done = prepare(made, to, image="img:1", volumes=[f"disk:{here}"], options=options)
    assert done.command == ("kubectl", "apply", "-f", f"runs/r/job/{to}.yaml")
    return list(yaml.safe_load_all(done.file.read_text()))


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec = documents[0]["spec"]
    if documents[0]["kind"] == "Job":
        return dict(spec["tasks"][0]["template"]["spec"])
    return dict(spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("to", ["kubeflow", "volcano"])
@pytest.mark.parametrize("kind", ["cuda", "npu", "cpu"])
def test_manifests_have_only_fields_of_the_schema(to: str, kind: str, here: Path) -> None:
    documents = manifests(to, plan(kind, restarts=2), here)
    assert [found for document in documents for found in unknown_fields(document, document["kind"])] == []
    assert {document["apiVersion"] for document in documents} == {
        "trainer.kubeflow.org/v1alpha1" if to == "kubeflow" else "batch.volcano.sh/v1alpha1"
    }


@pytest.mark.parametrize("to", ["kubeflow", "volcano"])
def test_a_pod_has_the_devices_the_disks_and_the_command(to: str, here: Path) -> None:
    pod = pod_of(manifests(to, plan("npu", nproc=16), here))
    (container,) = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": 128}, "limits": {"huawei.com/Ascend910": 16}}
    assert container["args"] == ["python", "-m", "ascendfactory", "train", f"{here}/runs/r/plan.json"]
    assert (container["name"], container["image"], container["workingDir"]) == ("node", "img:1", str(here))
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"volume-0": str(here), "shm": "/dev/shm"}
    assert pod["volumes"] == [
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "disk"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)


def test_limits_follow_the_device(here: Path) -> None:
    assert pod_of(manifests("volcano", plan("cuda"), here))["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod_of(manifests("volcano", plan("cpu", nproc=4), here))["containers"][0]["resources"] == {"requests": {"cpu": 4}, "limits": {}}


def test_volcano_starts_all_or_none_and_again_as_often_as_the_recipe_says(here: Path) -> None:
    (job,) = manifests("volcano", plan("npu", restarts=2), here)
    spec = job["spec"]
    assert (spec["minAvailable"], spec["tasks"][0]["replicas"], spec["maxRetry"]) == (2, 2, 3)
    assert spec["policies"] == [
        {"exitCode": 2, "action": "TerminateJob"},
        {"exitCode": 130, "action": "TerminateJob"},
        {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"},
    ]
    assert job["metadata"]["labels"] == spec["tasks"][0]["template"]["metadata"]["labels"] == {"ring-controller.atlas": "ascend-910b"}
    (once,) = manifests("volcano", plan("cuda"), here)
    assert once["spec"]["policies"][-1]["action"] == "TerminateJob"
    assert "labels" not in once["metadata"]


def test_what_volcano_tells_a_pod_is_its_place(here: Path) -> None:
    (job,) = manifests("volcano", plan(), here)
    name, task = job["metadata"]["name"], job["spec"]["tasks"][0]["name"].upper()
    hosts = ",".join(f"{name}-{task.lower()}-{i}.{name}" for i in range(2))
    place = find_place({"VC_TASK_INDEX": "1", f"VC_{task}_HOSTS": hosts, f"VC_{task}_NUM": "2"})
    assert (place.rank, place.nodes, place.master_addr) == (1, 2, f"{name}-worker-0.{name}")
    assert set(job["spec"]["plugins"]) == {"env", "svc"}


def test_kubeflow_gets_a_runtime_of_its_own(here: Path) -> None:
    runtime, job = manifests("kubeflow", plan(restarts=2), here)
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 8}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    jobs = runtime["spec"]["template"]["spec"]
    assert jobs["failurePolicy"] == {
        "maxRestarts": 2,
        "rules": [{"name": "never_again", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    (node,) = jobs["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (node["name"], node["replicas"], node["template"]["spec"]["backoffLimit"]) == ("node", 1, 0)
    assert node["template"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 130]
    once, _ = manifests("kubeflow", plan(), here)
    assert "failurePolicy" not in once["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["Qwen3_8B.sft", "8b", "中文", "a" * 80, "x" * 29 + "_y"])
def test_names_are_dns_labels_and_short_enough_for_the_pods(name: str, here: Path) -> None:
    _, job = manifests("kubeflow", plan("cuda", f"--name={name}"), here)
    label = job["metadata"]["name"]
    assert label.strip("abcdefghijklmnopqrstuvwxyz0123456789-") == "" and label[0].isalpha() and "--" not in label
    assert len(f"{label}-node-0-9999-abcde") < 64


def test_options_are_merged_into_the_manifest(here: Path) -> None:
    options = [
        "metadata: {namespace: team, labels: {kueue.x-k8s.io/queue-name: q}}",
        "pod: {nodeSelector: {zone: a}, volumes: [{name: driver, hostPath: {path: /usr/local/Ascend/driver}}]}",
        "container: {env: [{name: HCCL_CONNECT_TIMEOUT, value: '1200'}], resources: {limits: {huawei.com/ascend-1980: 8, rdma/hca: 1}}}",
        "spec: {suspend: true}",
        "runtime: {podGroupPolicy: {volcano: {}}}",
    ]
    runtime, job = manifests("kubeflow", plan("npu"), here, *options)
    assert job["metadata"]["namespace"] == runtime["metadata"]["namespace"] == "team"
    assert runtime["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "torch", "kueue.x-k8s.io/queue-name": "q"}
    assert (job["spec"]["suspend"], runtime["spec"]["podGroupPolicy"]) == (True, {"volcano": {}})
    pod = pod_of([runtime, job])
    assert pod["nodeSelector"] == {"zone": "a"}
    assert [volume["name"] for volume in pod["volumes"]] == ["volume-0", "shm", "driver"]
    assert [variable["name"] for variable in pod["containers"][0]["env"]] == ["PYTHONUNBUFFERED", "HCCL_CONNECT_TIMEOUT"]
    # the device under another name of its maker takes the place of ours
    assert pod["containers"][0]["resources"]["limits"] == {"huawei.com/ascend-1980": 8, "rdma/hca": 1}


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("--partition=gpu", r"--option: '--partition=gpu' is no YAML mapping; write such as 'metadata: \{namespace: team\}'"),
        ("pod: x", "no YAML mapping"),
        ("pod: {", "no YAML mapping"),
        ("metdata: {namespace: t}", "'metdata' is no part of the manifest; write metadata"),
        ("runtime: {podGroupPolicy: {}}", "'runtime' is no part of the manifest; write"),
        ("spec: {minAvailable: 1}", "spec.minAvailable comes from the recipe"),
        ("container: {image: x}", "container.image comes from the recipe, --image or --volume"),
        ("container: {env: {A: b}}", "container.env is a list; write one"),
        ("spec: {plugins: ssh}", "spec.plugins is a mapping; write one"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(option: str, match: str, here: Path) -> None:
    refused(match, plan(), "volcano", image="i", volumes=[f"disk:{here}"], options=[option])


def test_everything_named_has_to_be_where_the_pods_find_it(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    words: dict[str, Any] = {"image": "i", "volumes": [f"disk:{here}/runs"]}
    refused(
        rf"^output.dir: {here}/runs/r is on no volume \(none is mounted\); add --volume CLAIM:{here}/runs, or", plan(), "volcano", image="i"
    )
    refused(rf"^model.path: {here}/m is on no volume \({here}/runs\); add --volume CLAIM:{here}, or", plan(), "volcano", **words)
    words = {"image": "i", "volumes": [f"disk:{here}"]}
    refused(rf"^data.eval\[0\].path: {other} is on no volume", plan("cuda", f"--data.eval={other}"), "volcano", **words)
    refused(r"^data.eval\[0\].path: /.*/e.jsonl is on no volume", plan("cuda", "--data.eval=../e.jsonl"), "volcano", **words)
    refused(r"^data.eval\[0\].path: '~' is another folder in a container; write /", plan("cuda", "--data.eval=~/e"), "volcano", **words)
    made = prepare(plan("cuda", "--data.eval=/opt/data/e.jsonl"), "volcano", **words)
    assert [note.en for note in made.notes] == [
        "data.eval[0].path: /opt/data/e.jsonl is not here and on no volume: it has to be in the image"
    ]


def test_a_working_folder_that_the_pods_do_not_have_is_not_asked_for(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    disk = tmp_path_factory.mktemp("disk")
    (disk / "m").mkdir()
    made = plan("cuda", f"--model.path={disk}/m", f"--data.train={disk}", run_dir=f"{disk}/r")
    done = prepare(made, "volcano", image="i", volumes=[f"disk:{disk}"])
    assert pod_of(list(yaml.safe_load_all(done.file.read_text())))["containers"][0]["workingDir"] == f"{disk}/r"


def test_volumes_are_read_and_a_claim_can_be_mounted_twice(here: Path) -> None:
    assert read_volumes(["a.b-c:/data/", "x:/y"]) == (Volume("a.b-c", "/data"), Volume("x", "/y"))
    for wrong in ("data", "data:rel", "Data:/x", ":/x", "data:/", "data:/dev/shm", "a:/x:ro"):
        with pytest.raises(UserError, match=r"--volume: '.*' is not CLAIM:/path, such as --volume datasets:/data"):
            read_volumes([wrong])
    with pytest.raises(UserError, match="/x is mounted twice"):
        read_volumes(["a:/x", "b:/x/"])
    made = prepare(plan(), "volcano", image="i", volumes=[f"disk:{here}", "disk:/more"])
    pod = pod_of(list(yaml.safe_load_all(made.file.read_text())))
    assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == ["volume-0", "volume-0", "shm"]
    assert len(pod["volumes"]) == 2


def test_the_environment_of_another_framework_goes_with_the_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = plan("cuda").model_copy(update={"backend": "llamafactory"})
    words: dict[str, Any] = {"image": "i", "volumes": [f"disk:{here}"]}
    monkeypatch.delenv("ASCENDFACTORY_ENVIRONMENTS", raising=False)
    (note,) = prepare(foreign, "volcano", **words).notes
    assert note.en.startswith("the image has to have the environment llamafactory-0.9.5; or set ASCENDFACTORY_ENVIRONMENTS")
    monkeypatch.setenv("ASCENDFACTORY_ENVIRONMENTS", str(here / "envs"))
    made = prepare(foreign, "volcano", **words)
    assert made.notes == []
    env = pod_of(list(yaml.safe_load_all(made.file.read_text())))["containers"][0]["env"]
    assert env[1] == {"name": "ASCENDFACTORY_ENVIRONMENTS", "value": f"{here}/envs"}
    with pytest.raises(UserError, match="ascendfactory install llamafactory"):  # the nodes of Slurm see this disk
        prepare(foreign, "slurm")


# both


def test_what_can_be_seen_from_here_is_refused_before_it_waits_in_a_queue(here: Path) -> None:
    refused("--to: 'slrum' is none of slurm, kubeflow, volcano; did you mean slurm", plan(), "slrum")
    refused("--image: is missing", plan(), "kubeflow")
    refused("--image: Slurm starts no container", plan(), "slurm", image="i")
    refused("--volume: Slurm starts no container", plan(), "slurm", volumes=["a:/b"])
    refused(r"data.train\[0\].path: no such file or folder: e.jsonl", plan("cuda", "--data.train=e.jsonl"), "slurm")
    refused("model.path: there is no folder 'smollm2-135m' here; download", plan("cuda", "--model.path=smollm2-135m"), "slurm")
    refused(
        "every start on the nodes would go back to old/c; copy it to runs/r/checkpoints", plan("cuda", "--checkpoint.resume=old/c"), "slurm"
    )


def test_a_run_that_starts_over_does_so_once_when_it_is_submitted(here: Path) -> None:
    prepare(plan(), "slurm")
    prepare(plan("cuda", "--checkpoint.resume=none"), "slurm")
    assert (here / "runs/r-old-1/job/slurm.sh").exists() and (here / "runs/r/job/slurm.sh").exists()
    assert json.loads((here / "runs/r/plan.json").read_text())["recipe"]["checkpoint"]["resume"] == "auto"
