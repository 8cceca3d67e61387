"""Files of AscendFactory 6.5 as its users have them (tests/launch/old): run, migrated, overridden, wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascendfactory import cli
from ascendfactory.backends import llamafactory, mindspeed_llm, mindspeed_mm, verl_config
from ascendfactory.catalog.read import find_card
from ascendfactory.cli.legacy import set_environment
from ascendfactory.cli.old_config import experiment_names, preset
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Recipe
from ascendfactory.launch.legacy import BACKENDS, migrate
from ascendfactory.launch.legacy_options import LLAMAFACTORY, MEGATRON, VERL
from ascendfactory.launch.old_names import keep_old_names, link_results
from tests.backends.plans import make_job_plan, make_recipe

OLD = Path(__file__).parent / "old"
FILES = sorted(path.stem for path in OLD.glob("*.yaml"))


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """English, wide lines, no accelerator."""
    for name, value in {"LC_ALL": "C.UTF-8", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.run(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


# What a dry run shows of each file: the plan's head, and values as they reach the framework.
SHOWN = {
    "llamafactory_lora": [
        "Qwen2.5-7B · sft · lora · bfloat16 · llamafactory",
        "1 x 8 snt9b: dp 8, zero 1",
        "-m torch.distributed.run --standalone --nproc-per-node 8",
        "model_name_or_path: /home/ma-user/ws/model/Qwen2.5-7B",
        "lora_dropout: 0.05",
        "cutoff_len: 4096",
        "per_device_train_batch_size: 2",
        "gradient_accumulation_steps: 4",
        "learning_rate: 0.0001",
        "num_train_epochs: 5.0",
        "warmup_ratio: 0.1",
        "save_total_limit: 3",
        "template: qwen",
        "max_samples: 100000",
        '"path": "/home/ma-user/AscendFactory/third-party/LLaMA-Factory/data/alpaca_en_demo.json"',
    ],
    "mindspeed_llm_full": [
        "Qwen2.5-7B · sft · full · bfloat16 · mindspeed_llm",
        "1 x 8 snt9b: tp 4, pp 2, zero 1, sp, 1f1b, recompute full (2 layers), reuse_params",
        "--target-tensor-parallel-size 4 --target-pipeline-parallel-size 2",
        "--lr 1.25e-06 --min-lr 1.25e-07 --lr-decay-style cosine --weight-decay 0.0",
        "--global-batch-size 64 --seq-length 4096",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--seed 1234 --lr-warmup-fraction 0.01",
        "--variable-seq-lengths",
        "--tokenizer-not-use-fast",
        '"steps": 2000',
        '"path": "/home/ma-user/ws/training_data/alpaca_gpt4_data.json",\n      "format": "alpaca"',
    ],
    "mindspeed_mm_full": [
        "Qwen2.5-VL-7B · sft · full · bfloat16 · mindspeed_mm",
        "1 x 8 snt9b: dp 2, pp 4",
        "--cfg.parallel_config.llm_pp_layers '[[1,10,10,7]]' --cfg.parallel_config.vit_pp_layers '[[32,0,0,0]]'",
        "--clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999",
        "--train-iters 1000",
        "--seq-length 2048",
        '"dataset": "/home/ma-user/ws/training_data/mllm_format_llava_instruct_data.json"',
    ],
    "mindspeed_rl_grpo": [
        "Qwen2.5-7B · grpo · full · bfloat16 · mindspeed_rl",
        "1 x 16 snt9b23: dp 4, tp 2, pp 2, zero 1, sp",
        "/src/MindSpeed-RL/cli/train_grpo.py' --config-dir",
        "global_batch_size: 32",
        "seq_length: 8192",
        "train_iters: 500",
        "micro_batch_size: 4",
        "lr: 1.0e-06",
        "n_samples_per_prompt: 8",
        "max_prompt_length: 2048",
        "init_kl_coef: 0.001",
        "num_npus: 16",
    ],
    "verl_grpo": [
        "Qwen3-8B · grpo · full · bfloat16 · verl",
        "1 x 8 snt9b: dp 4, ulysses 2, zero 3, recompute full, offload_optimizer",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=32 data.max_prompt_length=1024 data.max_response_length=3072",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-06",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "'actor_rollout_ref.actor.optim.betas=[0.9,0.999]'",
        "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "trainer.test_freq=5",
        "trainer.total_epochs=5",
        "data.truncation=error",
        "actor_rollout_ref.rollout.enforce_eager=True",
    ],
}


def test_there_is_a_file_for_each_back_end() -> None:
    assert set(FILES) == set(SHOWN) and len(FILES) == len(BACKENDS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_dry_and_its_recipe_is_the_same_job(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(OLD / f"{name}.yaml")
    code, old, told = run(capsys, "train", file, "--dry-run")
    assert code == 0
    assert [part for part in SHOWN[name] if part not in old] == []
    assert "· decided by AscendFactory now, left out: " in told
    code, recipe, told = run(capsys, "migrate", file)
    assert code == 0 and "· cluster: no accelerator here; planned for 1x" in told
    (tmp_path / "r.yaml").write_text(recipe, encoding="utf-8")
    assert list(yaml.safe_load(recipe)) == [key for key in Recipe.model_fields if key in yaml.safe_load(recipe)]
    assert run(capsys, "train", str(tmp_path / "r.yaml"), "--dry-run") == (0, old, "")


def test_overrides_of_launch_and_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env.MASTER_ADDR=10.0.0.1", "--env.NNODES=2", "--env.NODE_RANK=1", "--backend_config.training.lr=2e-6"]
    words += ["--backend_config.training.num-layer-list=13,15", "--load", "/home/ma-user/ws/output/qwen2.5-7b_full-4k/saved_checkpoints"]
    code, shown, told = run(capsys, "train", str(OLD / "mindspeed_llm_full.yaml"), "--dry-run", *words)
    assert code == 0 and "2 x 8 snt9b: dp 2, tp 4, pp 2" in shown
    assert "--lr 2e-06 --min-lr 1.25e-07" in shown and "--num-layer-list 13,15" in shown
    assert "goes on from the newest checkpoint of /home/ma-user/ws/output/qwen2.5-7b_full-4k/checkpoints by itself" in told
    assert "· env.MASTER_ADDR, env.NODE_RANK, env.MASTER_PORT: no part of a recipe" in told


def test_sizes_of_one_device_become_a_sum_over_the_devices_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(OLD / "llamafactory_lora.yaml")
    two = "--env.ASCEND_RT_VISIBLE_DEVICES=0,1"
    for words, devices in (([], 8), (["--env.NNODES=2"], 16), (["--cluster", "2x16 snt9b23"], 32), ([two], 2)):
        code, recipe, _ = run(capsys, "migrate", file, *words)
        assert code == 0 and load_recipe(recipe).batch.global_size == 4 * 2 * devices


def test_train_sets_what_env_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", seen)
    set_environment(str(OLD / "llamafactory_lora.yaml"), ["--env.NNODES=2", "--env.NODE_RANK", "1", "--cluster=8 snt9b"])
    assert seen == {
        "MASTER_ADDR": "localhost",
        "NNODES": "2",
        "NODE_RANK": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "DISABLE_MAIN_PROCESS_FIRST": "True",
    }


def _file(tmp_path: Path, name: str, **changes: Any) -> str:
    """A copy of an old file with dotted keys changed; None takes a key out."""
    tree = yaml.safe_load((OLD / f"{name}.yaml").read_text(encoding="utf-8"))
    for path, value in changes.items():
        *groups, last = path.split("/")
        holder = tree
        for group in groups:
            holder = holder[group]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(tmp_path / "x.yaml")


TRAINING = "backend_config/training/"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mindspeed_llm_full", {"af_model_name": None}, "af_model_name: is missing; write the model, such as qwen2.5-7b"),
    (
        "llamafactory_lora",
        {"af_model_name": None, "af_modle_name": "qwen2.5-7b"},
        "af_model_name: is missing; did you mean it by 'af_modle_name'?",
    ),
    (
        "mindspeed_llm_full",
        {"backend_config/trainign": {"lr": 1e-6}},
        "backend_config.trainign: mindspeed-llm has no such section; did you mean 'training'?",
    ),
    (
        "verl_grpo",
        {"backend_config/megatron": {"a": 1}},
        "backend_config.megatron: verl has no such section; it has data, actor_rollout_ref, critic, algorithm, trainer, "
        "rollout, reward_model, custom_reward_function, ray_kwargs, ascend_precision_collector",
    ),
    (
        "mindspeed_llm_full",
        {"backend_config/preprocess_data": "alpaca.json"},
        "backend_config.preprocess_data: is a section of options, not 'alpaca.json'; write 'option: value' lines under it",
    ),
    (
        "mindspeed_llm_full",
        {TRAINING + "seq-length": "4k"},
        'backend_config.training.seq-length: "4k" does not fit; it should be a whole number of at least 8',
    ),
    (
        "llamafactory_lora",
        {TRAINING + "learning_rate": "small"},
        'backend_config.training.learning_rate: "small" does not fit; it should be a number above 0',
    ),
    (
        "llamafactory_lora",
        {TRAINING + "gradient_accumulation_steps": "eight"},
        "backend_config.training.gradient_accumulation_steps: 'eight' is no whole number above 0, such as 1",
    ),
    ("llamafactory_lora", {"env/NNODES": "two"}, "env.NNODES: 'two' is no whole number above 0, such as 1"),
    (
        "mindspeed_llm_full",
        {TRAINING + "save": "${af_output_dri}/checkpoints"},
        "backend_config.training.save: ${af_output_dri} refers to a key that is not there; did you mean ${af_output_dir}?",
    ),
    (
        "mindspeed_llm_full",
        {TRAINING + "swap-modlues": "mlp"},
        "backend_config.training.swap-modlues: no such option; did you mean swap-modules?",
    ),
    (
        "mindspeed_llm_full",
        {"backend_config/preprocess_data/handler-name": "AlpacaInstructionHandler"},
        "backend_config.preprocess_data.handler-name: 'AlpacaInstructionHandler' is not run by this back end; "
        "write one of AlpacaStyleInstructionHandler, GeneralPretrainHandler, GeneralInstructionHandler, "
        "SharegptStyleInstructionHandler, OpenAIInstructionHandler, AlpacaStylePairwiseHandler, SharegptStylePairwiseHandler",
    ),
    (
        "mindspeed_llm_full",
        {TRAINING + "load": "/data/mcore"},
        "backend_config.training.load: /data/mcore is a Megatron checkpoint outside of af_output_dir; give Hugging Face weights in "
        "tokenizer-name-or-path and leave it out",
    ),
    (
        "mindspeed_llm_full",
        {"backend_config/preprocess_data/input": None},
        "backend_config.preprocess_data.input: is missing; the prepared data of training.data-path cannot be read back; "
        "write the raw data file there",
    ),
    (
        "mindspeed_llm_full",
        {TRAINING + "noop-layers": "0,99"},
        "backend_config.training.noop-layers: '0,99' is not taken beside 28 layers, pp 2 and 1 chunks a stage; "
        "write the real ones as num-layer-list: 7,8,7",
    ),
    (
        "llamafactory_lora",
        {TRAINING + "finetuning_type": "freeze"},
        "backend_config.training.finetuning_type: 'freeze' is not run by this back end; write one of full, lora",
    ),
    (
        "verl_grpo",
        {"backend_config/actor_rollout_ref/rollout/enforce_eagre": True},
        "backend_config.actor_rollout_ref.rollout.enforce_eagre: no such option; did you mean actor_rollout_ref.rollout.enforce_eager?",
    ),
    (
        "mindspeed_rl_grpo",
        {"backend_config/rl_config/n_sample_per_prompt": 4},
        "backend_config.rl_config.n_sample_per_prompt: no such option; did you mean rl_config.n_samples_per_prompt?",
    ),
    (
        "mindspeed_mm_full",
        {"backend_config/data/dataset_param/basic_parameters/train_on_promt": True},
        "backend_config.data.dataset_param.basic_parameters.train_on_promt: no such option; "
        "did you mean dataset_param.basic_parameters.train_on_prompt?",
    ),
]


@pytest.mark.parametrize(("name", "changes", "line"), WRONG, ids=[line.split(":")[0] for _, _, line in WRONG])
def test_a_wrong_file_is_one_line(
    name: str, changes: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path, name, **changes)
    code, shown, told = run(capsys, "train", file, "--dry-run")
    assert (code, shown, told) == (2, "", f"error: {line}\n")
    assert run(capsys, "migrate", file) == (2, "", f"error: {line}\n")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    chinese = run(capsys, "migrate", file)[2]
    assert chinese.count("\n") == 1 and chinese.startswith(f"错误: {line.split(':')[0]}: ") and re.search("[一-鿿]{2}", chinese[4:])


def test_what_a_framework_cannot_do_is_told_by_the_old_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _file(tmp_path, "mindspeed_llm_full", **{TRAINING + "lr-decay-style": "WSD", TRAINING + "train-iters": 10})
    code, _, told = run(capsys, "train", file, "--dry-run")
    assert code == 2
    assert told.splitlines()[-1] == "error: backend_config.training.lr-decay-style: mindspeed_llm: no wsd schedule; write schedule: cosine"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--env.NNODES", "--env.NNODES: needs a value: --env.NNODES=..."),
        ("--training.lr=1", "--training.lr=1: no such key; write it from the top of the file, such as --backend_config.training.lr=..."),
        (
            "qwen2.5-7b",
            "qwen2.5-7b: unexpected; the form is 'train FILE --key=value' "
            "(that of 'train FILE MODEL EXPERIMENT' ended with release 6.5.902)",
        ),
    ],
)
def test_a_wrong_override_is_one_line(word: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "train", str(OLD / "mindspeed_llm_full.yaml"), "--dry-run", word) == (2, "", f"error: {line}\n")


def test_former_verbs_name_what_does_it_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "performance")[2] == "error: no command 'performance'; did you mean 'ascendfactory runs compare'?\n"


def _recipe(tmp_path: Path, name: str, **changes: Any) -> Recipe:
    from ascendfactory.cli.legacy import recipe_text

    return load_recipe(recipe_text(_file(tmp_path, name, **changes), [], [])[0])


def test_what_is_registered_is_read_from_dataset_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = {
        "mine": {"file_name": "sets/mine.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "talks": {"file_name": "talks.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
        "far": {"hf_hub_url": "someone/far"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    changes = {TRAINING + "dataset_dir": str(tmp_path), TRAINING + "dataset": "mine, talks"}
    train = _recipe(tmp_path, "llamafactory_lora", **changes).data.train
    assert [(source.path, source.columns) for source in train] == [
        (f"{tmp_path}/sets/mine.jsonl", {"instruction": "question", "output": "answer"}),
        (f"{tmp_path}/talks.json", {}),
    ]
    wrong = {"mien": f"'mien' is not registered in {tmp_path}/dataset_info.json; did you mean 'mine'?", "far": "'far' lies on a hub"}
    for name, words in wrong.items():
        code, _, told = run(capsys, "migrate", _file(tmp_path, "llamafactory_lora", **changes | {TRAINING + "dataset": name}))
        assert code == 2 and told.startswith(f"error: backend_config.training.dataset: {words}")


def test_options_of_verls_rollout_engine_reach_it_key_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = {"vllm": {"disable_mm_preprocessor_cache": True}}
    file = _file(tmp_path, "verl_grpo", **{"backend_config/actor_rollout_ref/rollout/engine_kwargs": kwargs})
    code, shown, _ = run(capsys, "train", file, "--dry-run")
    assert code == 0 and "++actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True" in shown


def test_verls_options_that_mean_something_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor, section = "backend_config/actor_rollout_ref/actor/", "backend_config/"
    changes = {
        actor + "use_kl_loss": False,
        actor + "clip_ratio": 0.1,
        section + "algorithm/adv_estimator": "gae",
        section + "algorithm/use_kl_in_reward": True,
        section + "critic": {"optim": {"lr": 2e-5}, "model": {"path": "m"}, "cliprange_value": 0.4},
        section + "custom_reward_function": {"path": "/w/score.py", "name": "score"},
        section + "trainer/test_freq": -1,
        section + "trainer/resume_mode": "disable",
        section + "+ascend_precision_collector": "/w/collector.yaml",
    }
    recipe = _recipe(tmp_path, "verl_grpo", **changes)
    objective = recipe.objective
    assert (objective.kind, objective.critic_lr, objective.kl_coef, objective.kl_kind) == ("ppo", 2e-5, 0.001, "k1")
    assert (objective.clip_low, objective.clip_high, objective.reward) == (0.1, 0.1, "/w/score.py:score")
    assert recipe.data.eval == [] and recipe.checkpoint.resume == "none" and recipe.extra["critic.cliprange_value"] == 0.4
    told = run(capsys, "migrate", str(tmp_path / "x.yaml"))[2]
    assert "· ascend_precision_collector: left out; verl has a dump of its own" in told and "critic: model.path" in told


def test_megatrons_options_that_mean_something_together(tmp_path: Path) -> None:
    more = {"num-layers-per-virtual-pipeline-stage": 7, "expert-model-parallel-size": 2, "moe-tp-extend-ep": True, "recompute-norm": True}
    changes = {TRAINING + name: value for name, value in more.items()}
    changes |= {TRAINING + name: None for name in ("recompute-granularity", "recompute-method", "recompute-num-layers", "load")}
    changes |= {"backend_config/preprocess_data/neat-pack": True, "backend_config/preprocess_data/map-keys": '{"prompt": "question"}'}
    recipe = _recipe(tmp_path, "mindspeed_llm_full", **changes)
    assert (recipe.layout.vpp, recipe.layout.ep, recipe.layout.recompute, recipe.layout.ring) == (2, 8, "norm", 1)
    assert recipe.data.packing == "packed" and recipe.data.train[0].columns == {"instruction": "question"}
    assert recipe.model.init == "pretrained" and recipe.output.export is False


@pytest.mark.parametrize(("fake", "stages"), [("28,29", [15, 13]), ("0, 29", [14, 14]), ("0,1", [13, 15])])
def test_fake_layers_become_the_real_ones_of_each_stage(fake: str, stages: list[int], tmp_path: Path) -> None:
    """The official scripts count fake layers in num-layers: 28 real ones and 2."""
    changes = {"num-layers": 30, "noop-layers": fake, "pipeline-model-parallel-size": 2}
    recipe = _recipe(tmp_path, "mindspeed_llm_full", **{TRAINING + name: value for name, value in changes.items()})
    assert recipe.layout.stage_layers == stages


def test_what_an_old_file_leaves_out_is_what_its_framework_takes(tmp_path: Path) -> None:
    names = ("learning_rate", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "lora_alpha", "lora_rank", "packing")
    recipe = _recipe(tmp_path, "llamafactory_lora", **{TRAINING + name: None for name in names})
    assert (recipe.optim.lr, recipe.optim.schedule, recipe.optim.warmup.amount, recipe.duration.amount) == (5e-5, "linear", 0.0, 3)
    assert recipe.data.packing == "dynamic"
    names = ("lr-decay-style", "weight-decay", "adam-beta2", "seed", "variable-seq-lengths")
    recipe = _recipe(tmp_path, "mindspeed_llm_full", **{TRAINING + name: None for name in names})
    assert (recipe.optim.schedule, recipe.optim.weight_decay, recipe.optim.beta2, recipe.seed) == ("linear", 0.01, 0.999, 1234)
    assert recipe.data.packing == "fixed"


HANDLED = {  # options that the readers take apart themselves
    *("stage", "finetuning_type", "dataset", "dataset_dir", "gradient_accumulation_steps", "deepspeed", "train_on_prompt", "mask_history"),
    *("packing", "neat_packing", "disable_gradient_checkpointing", "template", "eval_dataset"),
    *("data-path", "load", "min-lr", "context-parallel-size", "context-parallel-algo", "ulysses-degree-in-cp", "use-ascend-coc"),
    *("coc-parallel-num", "num-layers-per-virtual-pipeline-stage", "schedules-method", "expert-model-parallel-size", "moe-tp-extend-ep"),
    *("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-norm", "variable-seq-lengths"),
}


def test_no_option_that_an_adapter_sets_is_left_under_extra() -> None:
    """There it would be refused: 'this is set from the recipe'."""
    config = llamafactory.train_config(make_job_plan(make_recipe("qwen2.5-7b", "llamafactory", "sft_lora"), {}))
    assert set(config) - set(LLAMAFACTORY) - HANDLED == set()
    layouts = [
        Layout(tp=2, pp=2, vpp=2, ring=2, ulysses=2, ep=2, zero=1, recompute="full", recompute_layers=1, overlap_chunks=2),
        Layout(schedule="dualpipev", pp=2, vpp=2),
        Layout(pp=3),
        Layout(recompute="norm"),
    ]
    flags: set[str] = set()
    for model in ("qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3", "glm-4-9b-chat", "qwen3-30b-a3b", "llama-3.1-8b"):
        for stage in ("sft_lora", "pretrain_full"):
            for layout in layouts:
                flags |= mindspeed_llm._set_by_us(make_recipe(model, "mindspeed_llm", stage), find_card(model), layout)
    for model in ("qwen2.5-vl-7b", "internvl3-8b"):
        for layout in layouts:
            flags |= {*mindspeed_mm._flags(make_recipe(model, "mindspeed_mm"), find_card(model), layout), *mindspeed_mm._PLACES}
    assert flags - set(MEGATRON) - HANDLED == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_preset_is_a_recipe(backend: str) -> None:
    model = {"mindspeed-mm": "qwen2.5_vl-7b"}.get(backend, "qwen2.5-7b")
    for name in experiment_names(backend):
        tree = preset(backend, model, name)
        recipe = load_recipe(yaml.safe_dump(migrate(tree).recipe))
        assert recipe.backend == BACKENDS[backend] and recipe.model.path.startswith("/path/to/model/Qwen2.5-")
        assert recipe.data.seq_len == {"8k": 8192, "16k": 16384, "32k": 32768}.get(name.rpartition("-")[2], 4096)


def test_config_asks_on_a_terminal_and_again_after_a_wrong_answer(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "ascendfactory", "config", "--output_file_path=x.yaml"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, text=True)
    os.write(ours, b"mindspeed_llm\nmindspeed-llm\nqwen3-8b\nful-8k\nfull-8k\n")
    shown, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, shown
    assert "--backend: no back end 'mindspeed_llm'; write mindspeed-llm" in shown
    assert "--exp_name: mindspeed-llm has no experiment 'ful-8k'; did you mean full-8k? All: pt-4k" in shown
    tree = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (tree["af_backend"], tree["af_model_name"]) == ("mindspeed-llm", "qwen3-8b")
    assert tree["backend_config"]["training"]["seq-length"] == 8192


def test_config_without_a_terminal_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    line = "error: --exp_name: is missing; write --exp_name=...: grpo, dapo, ppo\n"
    assert run(capsys, "config", "--backend=verl", "--af_model_name=qwen3-8b", "--output_file_path=x.yaml") == (2, "", line)
    line = "error: --exp_name: mindspeed-mm has no experiment 'grpo'; it has full\n"
    assert run(capsys, "config", "--backend=mindspeed-mm", "--af_model_name=qwen2.5_vl-7b", "--exp_name=grpo") == (2, "", line)


def test_folders_have_the_names_that_users_look_for(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "saved_checkpoints").mkdir()  # of an earlier release
    plan = make_job_plan(make_recipe("qwen2.5-7b", "mindspeed_llm"), {"tp": 4, "pp": 2, "zero": 1})
    keep_old_names(tmp_path, plan, {"af_model_name": "x"})
    keep_old_names(tmp_path, plan, {"af_model_name": "x"})
    links = {path.name: str(path.readlink()) for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == {"converted_weight_TP4PP2": "weights", "ckpt_converted_mg2hf": "export", "preprocess_data": "tokens"}
    (tmp_path / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "checkpoint-5").symlink_to("checkpoints/checkpoint-5")  # one that was removed since
    link_results(tmp_path, make_job_plan(make_recipe("qwen2.5-7b", "llamafactory", "sft_lora"), {}))
    assert {path.name: str(path.readlink()) for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-10": "checkpoints/checkpoint-10"}


def test_verls_options_are_known() -> None:
    sets: set[str] = set(verl_config.PLACES)
    for stage in ("grpo_full", "grpo_lora", "dapo_full", "ppo_full"):
        for layout in (Layout(), Layout(tp=2, pp=2, vpp=2, zero=1, recompute="full")):
            sets |= set(verl_config.derived(make_recipe("qwen3-8b", "verl", stage), layout))
    taken = {  # by the reader itself
        *("algorithm.adv_estimator", "algorithm.filter_groups.enable", "algorithm.use_kl_in_reward"),
        *("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type"),
        *("actor_rollout_ref.actor.optim.betas", "actor_rollout_ref.actor.ppo_mini_batch_size", "data.val_files", "trainer.test_freq"),
        *("trainer.resume_mode", "data.max_response_length"),
    }
    sets = {name for name in sets if not name.startswith(("critic.", "reward."))}  # dropped by the group; no name of release 0.5
    assert sets - set(VERL) - taken == set()
