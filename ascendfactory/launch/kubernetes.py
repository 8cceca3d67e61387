"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or a Job of Volcano. One pod a node, one launch a pod.

Kubeflow Trainer: API trainer.kubeflow.org/v1alpha1, fields as in v2.3.0 and present since v2.0.0
(https://github.com/kubeflow/trainer/tree/v2.3.0/manifests/base/crds). Pods are described in a TrainingRuntime of the job's own,
because what a TrainJob may change of a shared one has another name in each release (podSpecOverrides, podTemplateOverrides,
runtimePatches). It becomes a JobSet, jobset.x-k8s.io/v1alpha2 of v0.8.2 to v0.12.0.
Volcano: API batch.volcano.sh/v1alpha1, fields as in v1.15.1 and present since v1.8.0
(https://github.com/volcano-sh/volcano/blob/v1.15.1/config/crd/volcano/bases/batch.volcano.sh_jobs.yaml).
Ascend: resource and label of MindCluster 7.3.0's device plugin (https://www.hiascend.com/document/detail/zh/mindcluster/730,
YAML parameters of vcjob and acjob).
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Cluster, Line
from ascendfactory.launch.order import STOP_S, Order

Tree = dict[str, Any]
_NEVER_AGAIN = (2, 130)  # wrong input, stopped by hand: another attempt would end alike
_ASCEND_LABELS = {"ring-controller.atlas": "ascend-910b"}  # of Atlas A2 and A3 (snt9b, snt9b23)
_MAX_NAME = 30  # of a recipe; with stamp, pod number and the controllers' suffixes a name has to stay below 64
_FROM_THE_PLAN = {
    "metadata.name",
    "spec.minAvailable",
    "spec.tasks",
    "spec.runtimeRef",
    "spec.trainer",
    "runtime.mlPolicy",
    "runtime.template.spec.replicatedJobs",
    "pod.containers",
    "container.name",
    "container.image",
    "container.args",
}


def manifest(order: Order, to: str) -> str:
    """The YAML of a job.

    Args:
        order: what runs; its volumes hold the run folder.
        to: `kubeflow` or `volcano`.

    Raises:
        UserError: an option is no YAML of the form that docs/en/many-nodes.md tells, or says what the plan says.
    """
    pod = _pod(order)
    documents, roots = (_kubeflow if to == "kubeflow" else _volcano)(order, pod)
    roots |= {"metadata": [document["metadata"] for document in documents], "pod": [pod], "container": pod["containers"]}
    for option in order.options:
        _add(option, roots)
    return yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


def check_paths(order: Order) -> list[Line]:
    """Makes sure that the pods will find what the plan names; returns what only the image can have.

    Raises:
        UserError: a path is neither on a volume nor possibly in the image, with the fix.
    """
    if not _mounted(order, order.folder):
        raise _not_mounted(order, "output.dir", order.folder)
    notes = []
    for where, text in (*order.inputs(), *order.env):
        path = order.absolute(Path(text).expanduser())
        if text.startswith("~"):
            raise UserError(where, f"'~' is another folder in a container; write {path}", f"容器中的 '~' 是另一个文件夹；请写 {path}")
        if _mounted(order, path):
            continue
        if path.exists() or not Path(text).is_absolute():
            raise _not_mounted(order, where, path)
        notes.append(
            Line(
                en=f"{where}: {path} is not here and on no volume: it has to be in the image",
                zh=f"{where}：{path} 不在本机，也不在卷上：须在镜像中",
            )
        )
    return notes


def _mounted(order: Order, path: Path) -> bool:
    return any(path.is_relative_to(volume.path) for volume in order.volumes)


def _not_mounted(order: Order, where: str, path: Path) -> UserError:
    mounted = ", ".join(volume.path for volume in order.volumes)
    en = f"{path} is on no volume ({mounted or 'none is mounted'}); add --volume CLAIM:{path.parent}, or move it to one"
    zh = f"{path} 不在任何卷上（{mounted or '未挂载卷'}）；请加 --volume CLAIM:{path.parent}，或将其移到卷上"
    return UserError(where, en, zh)


def job_name(order: Order) -> str:
    """The name of the job: a DNS label, another one for each submission, since a finished job of the same name would stay finished."""
    name = re.sub(r"[^a-z0-9]+", "-", order.plan.recipe.name.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    return f"{name[:_MAX_NAME].strip('-')}-{order.stamp}"


def _pod(order: Order) -> Tree:
    """The pod of one node, the same for both kinds of job.

    The command is given as arguments of the image's own entry point: that of CANN images sets the toolkit's environment.
    """
    claims = list(dict.fromkeys(volume.claim for volume in order.volumes))
    mounts = [{"name": f"volume-{claims.index(volume.claim)}", "mountPath": volume.path} for volume in order.volumes]
    container = {
        "name": "node",
        "image": order.image,
        "workingDir": str(order.work_dir if _mounted(order, order.work_dir) else order.folder),
        "args": order.argv("python"),
        "env": [{"name": name, "value": value} for name, value in (("PYTHONUNBUFFERED", "1"), *order.env)],
        "resources": {"requests": {"cpu": order.cpus}, "limits": _devices(order.plan.cluster)},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, claim in enumerate(claims)]
    return {
        "restartPolicy": "Never",  # a node that comes back alone finds no others: the job as a whole starts again
        "terminationGracePeriodSeconds": STOP_S,
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],  # 64 MiB otherwise: too small for data loaders and NCCL
    }


def _devices(cluster: Cluster) -> Tree:
    match cluster.device.kind:
        case "cuda":
            return {"nvidia.com/gpu": cluster.nproc}
        case "npu":
            return {"huawei.com/Ascend910": cluster.nproc}
        case "cpu":
            return {}


def _labels(order: Order) -> Tree:
    return {"labels": dict(_ASCEND_LABELS)} if order.plan.cluster.device.kind == "npu" else {}


def _kubeflow(order: Order, pod: Tree) -> tuple[list[Tree], dict[str, list[Tree]]]:
    """A TrainingRuntime and its TrainJob. The controller tells the pods their place in PET_* variables."""
    name, nodes, restarts = job_name(order), order.plan.cluster.nodes, order.plan.recipe.cluster.restarts
    on_codes = {"containerName": "node", "operator": "In", "values": list(_NEVER_AGAIN)}
    job = {
        "backoffLimit": 0,  # a pod that fails ends the job on all nodes; whether it starts again is the JobSet's matter
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]},
        "template": ({"metadata": labels} if (labels := _labels(order)) else {}) | {"spec": pod},
    }
    trainer = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job}
    jobs: Tree = {"replicatedJobs": [{"name": "node", "replicas": 1, "template": trainer}]}
    if restarts:
        rule = {"name": "never_again", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        jobs = {"failurePolicy": {"maxRestarts": restarts, "rules": [rule]}} | jobs
    runtime: Tree = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": jobs}},
    }
    train_job: Tree = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": nodes, "numProcPerNode": order.plan.cluster.nproc},  # without it no pod gets PET_*
        },
    }
    return [runtime, train_job], {"spec": [train_job["spec"]], "runtime": [runtime["spec"]]}


def _volcano(order: Order, pod: Tree) -> tuple[list[Tree], dict[str, list[Tree]]]:
    """A Job of Volcano. Its plug-ins tell the pods their place: env VC_TASK_INDEX, svc VC_WORKER_HOSTS and names in the DNS."""
    nodes, restarts = order.plan.cluster.nodes, order.plan.recipe.cluster.restarts
    lost = {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob" if restarts else "TerminateJob"}
    job: Tree = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": job_name(order)} | _labels(order),
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": nodes,  # all or none
            "maxRetry": restarts + 1,  # Volcano gives up when as many restarts were asked for as this says
            "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
            "policies": [*({"exitCode": code, "action": "TerminateJob"} for code in _NEVER_AGAIN), lost],  # the first that fits
            "tasks": [
                {
                    "name": "worker",
                    "replicas": nodes,
                    "template": ({"metadata": labels} if (labels := _labels(order)) else {}) | {"spec": pod},
                }
            ],
        },
    }
    return [job], {"spec": [job["spec"]]}


def _add(option: str, roots: dict[str, list[Tree]]) -> None:
    """Puts what an option says into the manifest: `pod: {nodeSelector: {zone: a}}`."""
    try:
        read = yaml.safe_load(option)
    except yaml.YAMLError:
        read = None
    if not isinstance(read, dict) or not all(isinstance(value, dict) for value in read.values()):
        raise UserError(
            "--option",
            f"'{option}' is no YAML mapping; write such as 'metadata: {{namespace: team}}'",
            f"'{option}' 不是 YAML 映射；请写成 'metadata: {{namespace: team}}' 这样的形式",
        )
    for root, additions in read.items():
        if root not in roots:
            near = nearest(str(root), roots) or ", ".join(roots)
            raise UserError("--option", f"'{root}' is no part of the manifest; write {near}", f"清单中没有 '{root}'；请写 {near}")
        for target in roots[root]:
            if root == "container":
                _make_way(target, additions)
            _merge(target, copy.deepcopy(additions), root)


def _make_way(container: Tree, additions: Tree) -> None:
    """A device that the person names under its maker's prefix (huawei.com/ascend-1980 in CCE) takes the place of ours."""
    resources = additions.get("resources")
    named = resources.get("limits") if isinstance(resources, dict) else None
    makers = {str(name).partition("/")[0] for name in named if "/" in str(name)} if isinstance(named, dict) else set()
    limits: Tree = container["resources"]["limits"]
    for name in [name for name in limits if name.partition("/")[0] in makers]:
        del limits[name]


def _merge(target: Tree, additions: Tree, where: str) -> None:
    """Mappings are merged, lists grow, anything else is replaced."""
    for key, value in additions.items():
        path, old = f"{where}.{key}", target.get(key)
        if path in _FROM_THE_PLAN:
            raise UserError("--option", f"{path} comes from the recipe, --image or --volume", f"{path} 由配方、--image 或 --volume 决定")
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value, path)
        elif isinstance(old, list) and isinstance(value, list):
            old.extend(value)
        elif isinstance(old, (dict, list)):
            en, zh = ("a mapping", "映射") if isinstance(old, dict) else ("a list", "列表")
            raise UserError("--option", f"{path} is {en}; write one", f"{path} 是{zh}；请写{zh}")
        else:
            target[key] = value
