"""Jobs that are wrong on purpose: every one is refused, in one line, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascendfactory import cli
from ascendfactory.launch import local
from tests.cli.test_train import CONFIG

BASE = "model: {model}\ndata: {{train: d.jsonl, seq_len: 4096}}\nbatch: 64\nduration: 10 steps\n"
LF, LLM, MM, RL, VERL = ("llamafactory", "mindspeed_llm", "mindspeed_mm", "mindspeed_rl", "verl")
GRPO = ("--objective=grpo", "--optim.schedule=constant")
WRONG: list[tuple[str, str, tuple[str, ...], str]] = [  # model, back end, settings, what is said
    ("qwen2.5-7b", LF, ("--extra.cutof_len=9",), "extra.cutof_len: llamafactory: no such option; did you mean cutoff_len?"),
    ("qwen2.5-7b", LF, ("--extra.cutoff_len=9",), "extra.cutoff_len: llamafactory: this is set from the recipe"),
    ("qwen2.5-7b", LF, ("--extra.lora_plus_scale=1", "--extra.flash_attn=fa9"), "is not one of"),
    ("qwen2.5-7b", LF, ("--extra.max_grad_norm=a",), "extra.max_grad_norm"),
    ("qwen2.5-7b", LF, ("--profile=0.9.6",), "profile: llamafactory: no profile '0.9.6'; write profile: 0.9.5"),
    ("qwen2.5-7b", LF, ("--layout.tp=2",), "layout.tp: llamafactory: no tp; write tp: 1"),
    ("qwen2.5-7b", LF, ("--objective=dpo",), "data.packing: llamafactory: no packed pairs; write packing: dynamic"),
    ("qwen2.5-7b", LF, GRPO, "objective: llamafactory: no grpo"),
    ("qwen2.5-7b", LLM, ("--extra.no-such-flag=3",), "extra.no-such-flag: mindspeed_llm: no such option"),
    ("qwen2.5-7b", LLM, ("--layout.tp=8",), "layout.tp: tp 8 does not divide 28 attention heads; write tp: 4"),
    ("qwen2.5-7b", LLM, ("--extra.recompute-method=blok",), "extra.recompute-method"),
    ("qwen2.5-7b", LLM, ("--layout.overlap_chunks=3", "--layout.tp=2"), "no CoC in 3 pieces; write overlap_chunks: 4"),
    ("qwen2.5-7b", LLM, ("--tuning=lora", "--tuning.dora=true"), "tuning.dora: mindspeed_llm: no DoRA"),
    ("qwen2.5-7b", LLM, ("--objective=dpo", "--data.packing=dynamic"), "objective: mindspeed_llm: no preference training here"),
    ("qwen2.5-vl-7b", LLM, (), "model.path: mindspeed_llm: no layer specification"),
    ("llama-3.1-8b", LLM, ("--profile=v9.9",), "profile: mindspeed_llm: no profile 'v9.9'"),
    ("qwen3-8b", LLM, ("--layout.schedule=zbv", "--layout.pp=2", "--layout.vpp=2"), "no zbv schedule; write schedule: auto"),
    ("qwen2.5-7b", MM, (), "model.path: mindspeed_mm: only Qwen2.5-VL and InternVL3 here"),
    ("qwen2.5-vl-7b", MM, ("--tuning=lora",), "tuning: mindspeed_mm: no LoRA; write tuning: full"),
    ("qwen2.5-vl-7b", MM, ("--layout.vpp=2", "--layout.pp=2"), "layout.vpp: mindspeed_mm: no virtual pipeline here"),
    ("qwen2.5-7b", RL, (), "objective: mindspeed_rl: only grpo here"),
    ("llama-3.1-8b", RL, GRPO, "model.path: mindspeed_rl: no configuration for"),
    ("qwen2.5-7b", RL, (*GRPO, "--extra.use_kl=true"), "extra: mindspeed_rl: options of your own are not checked here"),
    ("qwen2.5-7b", VERL, (), "objective: verl: sft is left to other back ends"),
    ("qwen2.5-7b", VERL, (*GRPO, "--extra={trainer.save_freqq: 1}"), "no such option; did you mean trainer.save_freq?"),
    ("qwen2.5-7b", VERL, (*GRPO, "--layout.ulysses=2", "--layout.tp=2"), "layout.ulysses: verl: no Ulysses under Megatron"),
    (
        "qwen2.5-7b",
        VERL,
        (*GRPO, "--optim.in_backward=true", "--optim.max_grad_norm=0"),
        "optim.in_backward: in_backward keeps no gradient to add to",
    ),
]


@pytest.mark.parametrize(
    ("model", "backend", "settings", "line"), WRONG, ids=lambda value: "-".join(value) if isinstance(value, tuple) else None
)
def test_a_wrong_job_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    backend: str,
    settings: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    monkeypatch.setattr(local.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("started"))
    (tmp_path / "r.yaml").write_text(BASE.format(model=model))
    assert cli.run(["train", "r.yaml", "--cluster=8 snt9b", f"--backend={backend}", *settings]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert all(part.startswith("error: ") for part in said.splitlines()) and not (tmp_path / "runs").exists()


def test_the_list_is_long_enough_and_covers_every_back_end() -> None:
    assert len(WRONG) >= 15 and {row[1] for row in WRONG} == {LF, LLM, MM, RL, VERL}


def test_a_flawless_job_would_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words without the mistake get as far as the devices: the list does not refuse everything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "r.yaml").write_text(BASE.format(model="./m"))
    assert cli.run(["train", "r.yaml", "--cluster=1 cpu", "--backend=llamafactory", "--dry-run"]) == 0
