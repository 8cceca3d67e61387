"""AscendFactory 6.5 YAML: five files written from the public documentation's tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from ascendfactory import cli
from ascendfactory.backends import BACKENDS
from ascendfactory.cli.recipes import is_legacy
from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Dpo, Grpo, Lora, Pretrain, Recipe, Sft
from ascendfactory.launch.legacy import migrate, read_legacy

LLAMAFACTORY = """
af_output_dir: /work/out
af_model_name: qwen2.5-14b
env: {MASTER_ADDR: localhost, NNODES: 1, NODE_RANK: 0}
backend_config:
  training:
    stage: dpo
    model_name_or_path: /work/model/Qwen2.5-14B
    finetuning_type: lora
    lora_rank: 16
    lora_target: all
    dataset: dpo_en_demo
    dataset_dir: /work/LLaMA-Factory/data
    template: qwen
    cutoff_len: 4096
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 8
    learning_rate: 1.0e-5
    num_train_epochs: 5
    save_steps: 100
    deepspeed: examples/deepspeed/ds_z3_config.json
    output_dir: ${af_output_dir}
    pref_loss: sigmoid
"""
MINDSPEED_LLM = """
af_output_dir: /work/out
af_model_name: qwen2.5-7b
env: {MASTER_ADDR: 10.0.0.1, NNODES: 2, NODE_RANK: 1}
backend_config:
  preprocess_data:
    input: /work/data/alpaca.parquet
    handler-name: AlpacaStyleInstructionHandler
    tokenizer-name-or-path: ${backend_config.training.tokenizer-name-or-path}
  convert_ckpt_hf2mg:
    target-tensor-parallel-size: ${backend_config.training.tensor-model-parallel-size}
  convert_ckpt_mg2hf: null
  training:
    tokenizer-name-or-path: /work/model/Qwen2.5-7B
    tensor-model-parallel-size: 4
    pipeline-model-parallel-size: 1
    seq-length: 4096
    micro-batch-size: 1
    global-batch-size: 64
    lr: 1.25e-6
    min-lr: 1.25e-7
    train-iters: 2000
    save-interval: 500
    no-load-optim: false
    finetune: false
    seed: 1234
    context-parallel-size: 4
    context-parallel-algo: hybrid_cp_algo
    ulysses-degree-in-cp: 2
"""
VERL = """
af_output_dir: /work/out
af_model_name: qwen3-8b
backend_config:
  data: {train_files: /d/train.parquet, val_files: /d/test.parquet, train_batch_size: 32, max_prompt_length: 1024,
    max_response_length: 3072}
  actor_rollout_ref:
    model: {path: /work/model/Qwen3-8B}
    actor: {optim: {lr: 1.0e-6}, ppo_mini_batch_size: 8, ulysses_sequence_parallel_size: 2}
    rollout: {n: 5, tensor_model_parallel_size: 4}
  algorithm: {adv_estimator: grpo}
  trainer: {total_epochs: 5, save_freq: -1, default_local_dir: "${af_output_dir}/checkpoint_${af_model_name}"}
  +ascend_precision_collector: null
"""
MINDSPEED_RL = """
af_output_dir: /work/out
af_model_name: qwen2.5-7b
backend_config:
  preprocess_data: {input: /d/deepscaler.json, handler_name: R1AlpacaStyleInstructionHandler}
  megatron_training: {tokenizer_name_or_path: /m/Qwen2.5-7B, global_batch_size: 32, seq_length: 2048, train_iters: 500, save_interval: 100}
  actor_config: {micro_batch_size: 4, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, lr: 1.0e-6, no_load_optim: false}
  rl_config: {n_samples_per_prompt: 8}
"""
MINDSPEED_MM = """
af_output_dir: /work/out
af_model_name: qwen2.5_vl-7b
backend_config:
  data:
    dataset_param:
      preprocess_parameters: {model_name_or_path: /m/Qwen2.5-VL-7B}
      basic_parameters: {dataset_dir: /d, dataset: /d/mllm.json}
  convert_ckpt_hf2mg:
    cfg: {mm_dir: "${af_output_dir}/w_TP${backend_config.training.tensor-model-parallel-size}", parallel_config: {llm_pp_layers: [12, 16]}}
  training: {tensor-model-parallel-size: 1, pipeline-model-parallel-size: 2, global-batch-size: 64, lr: 1.0e-5, train-iters: 1000}
"""


def _recipe(text: str, *overrides: str) -> Recipe:
    assert is_legacy(text)
    return load_recipe(yaml.safe_dump(migrate(read_legacy(text, overrides)).recipe))


def test_llamafactory() -> None:
    recipe = _recipe(LLAMAFACTORY, "--af_output_dir=/elsewhere")
    assert isinstance(recipe.objective, Dpo) and isinstance(recipe.tuning, Lora) and recipe.tuning.rank == 16
    assert (recipe.backend, recipe.model.path, recipe.output.dir) == ("llamafactory", "/work/model/Qwen2.5-14B", "/elsewhere")
    assert recipe.data.train[0].path == "/work/LLaMA-Factory/data/dpo_en_demo.json" and recipe.data.packing == "dynamic"
    assert (recipe.batch.global_size, recipe.duration.amount, recipe.layout.zero) == (64, 5, 3)
    assert recipe.extra == {"template": "qwen", "pref_loss": "sigmoid"}


def test_mindspeed_llm() -> None:
    recipe = _recipe(MINDSPEED_LLM)
    assert isinstance(recipe.objective, Sft) and recipe.output.export is False
    assert (recipe.layout.tp, recipe.layout.ring, recipe.layout.ulysses) == (4, 2, 2)
    assert recipe.optim.min_lr_ratio == pytest.approx(0.1)
    assert (recipe.cluster.nodes, recipe.duration.amount, recipe.duration.unit, recipe.extra) == (2, 2000, "steps", {})


def test_pretraining_by_its_handler() -> None:
    text = MINDSPEED_LLM.replace("AlpacaStyleInstructionHandler", "GeneralPretrainHandler")
    assert isinstance(_recipe(text).objective, Pretrain)


def test_verl() -> None:
    recipe = _recipe(VERL, "--env.NNODES=2", "--backend_config.trainer.total_epochs=3")
    assert isinstance(recipe.objective, Grpo) and recipe.backend == "verl"
    assert (recipe.data.seq_len, recipe.cluster.nodes, recipe.duration.amount, recipe.layout.ulysses) == (4096, 2, 3, 2)
    assert recipe.extra == {} and (recipe.objective.num_answers, recipe.objective.max_prompt_tokens) == (5, 1024)


def test_mindspeed_rl_and_mm() -> None:
    rl, mm = _recipe(MINDSPEED_RL), _recipe(MINDSPEED_MM)
    assert (rl.backend, rl.layout.tp, rl.layout.pp, rl.data.train[0].path) == ("mindspeed_rl", 2, 2, "/d/deepscaler.json")
    assert (mm.backend, mm.model.path, mm.layout.pp, mm.data.train[0].path) == ("mindspeed_mm", "/m/Qwen2.5-VL-7B", 2, "/d/mllm.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("backend_config: {training: {model_name_or_path: '${af_nothing}', dataset: a}}", "refers to a key that is not there"),
        ("backend_config: {training: {model_name_or_path: '${oc.env:HOME}', dataset: a}}", "refers to a key that is not there"),
        ("af_a: ${af_b}\naf_b: ${af_a}\nbackend_config: {training: {}}", "circle"),
        ("af_output_dir: x", "backend_config"),
        ("backend_config: {training: {model_name_or_path: m}}", "dataset"),
        ("backend_config: {training: {dataset: d}}", "model_name_or_path"),
        ("backend_config: {training: {model_name_or_path: m, dataset: a, stage: ppo}}", "write one of dpo, pt, sft, rm"),
        ("af_backend: megatron\nbackend_config: {training: {}}", "write one of mindspeed-llm"),
        ("af_backend: mindspeed_llm\nbackend_config: {training: {}}", "did you mean mindspeed-llm"),
    ],
)
def test_wrong_files(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        migrate(read_legacy(f"af_model_name: m\n{text}"))


OLD = """
af_output_dir: out
af_model_name: tiny
backend_config:
  training: {stage: sft, model_name_or_path: ./m, finetuning_type: full, dataset: d, dataset_dir: ., cutoff_len: 512,
    per_device_train_batch_size: 1, gradient_accumulation_steps: 2, max_steps: 3, output_dir: "${af_output_dir}"}
"""


def test_a_run_of_an_old_file_leaves_the_names_that_people_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.test_train import CONFIG
    from tests.launch.test_compare import STEPS, Telling

    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "d.json").write_text('[{"instruction": "a", "output": "b"}]')
    (tmp_path / "old.yaml").write_text(OLD)
    monkeypatch.setitem(BACKENDS, "llamafactory", Telling("llamafactory", {"steps": STEPS, "rows": None}))
    words = ["train", "old.yaml", "--cluster=1 cpu", "--backend_config.training.seed=7"]
    assert cli.run(words) == 0
    run = tmp_path / "out"
    kept = yaml.safe_load((run / "exp-config.yaml").read_text())
    assert kept["backend_config"]["training"]["output_dir"] == "out" and kept["backend_config"]["training"]["seed"] == 7
    (log,) = (run / "logs").glob("*-run_log-*.txt")
    assert re.fullmatch(r"llamafactory_sft_full-m-512-cpu-\d{14}-run_log-R0_WS1\.txt", log.name)
    assert "@step" in log.read_text() and log.readlink().name == "attempt-1.log"
    assert (run / "training_loss.png").read_bytes()[:4] == b"\x89PNG"
