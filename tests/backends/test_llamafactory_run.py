"""LLaMA-Factory, really run on this machine through `train`; skipped where its environment is not installed (`make test-backends`)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascendfactory import cli
from ascendfactory.core.plan import StepMetrics
from ascendfactory.launch.environments import MARK, environment_dir, find_profile
from ascendfactory.launch.runs import read_metrics

pytestmark = [
    pytest.mark.backends,
    pytest.mark.skipif(
        not (environment_dir(find_profile("llamafactory").environment) / MARK).exists(), reason="ascendfactory install llamafactory"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokenizer the older transformers of that environment can read."""
    from tests.tiny import write_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, "llama")
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    return folder


def _run(model: Path, folder: Path, rows: list[dict[str, Any]], /, **settings: Any) -> list[StepMetrics]:
    """The steps that `ascendfactory train` reports of a run on LLaMA-Factory."""
    source = folder.parent / f"{folder.name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "name": folder.name,
        "model": str(model),
        "data": {"train": str(source), "seq_len": 64, **settings.pop("data", {})},
        "batch": {"global_size": 2, "micro_size": 1},
        "duration": "2 steps",
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0.0},
        "cluster": {"device": "cpu", "nproc": 1},
        "backend": "llamafactory",
        "checkpoint": {"every": "1 steps"},
        "output": {"dir": str(folder)},
        **settings,
    }
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert cli.run(["train", str(path)]) == 0
    return read_metrics(folder)


CHATS = [{"instruction": f"What is {i} + {i}?", "output": str(2 * i)} for i in range(20)]


def test_sft_trains_resumes_and_exports(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first = _run(model, tmp_path / "sft", CHATS)
    assert [step.step for step in first] == [1, 2] and first[-1].num_steps == 2 and first[0].lr == pytest.approx(1e-3)
    assert first[0].grad_norm > 0 and first[0].tokens == 2 * 64
    again = _run(model, tmp_path / "sft", CHATS, duration="3 steps")
    assert [step.step for step in again] == [1, 2, 3] and [s.loss for s in again[:2]] == [s.loss for s in first]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "export").num_parameters() > 0


def test_lora_resumes_and_exports_an_adapter_that_peft_reads(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = {"kind": "lora", "rank": 4}
    first = _run(model, tmp_path / "lora", CHATS, tuning=lora)
    again = _run(model, tmp_path / "lora", CHATS, tuning=lora, duration="3 steps")
    assert [s.loss for s in again[:2]] == [s.loss for s in first] and again[2].step == 3
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "lora" / "export"))
    assert adapted.peft_config["default"].r == 4
    trained = [weight for name, weight in adapted.named_parameters() if "lora_B" in name]
    assert trained and all(float(weight.abs().sum()) > 0 for weight in trained)  # they start at 0


def test_dpo_starts_at_ln_2_and_moves_away_from_the_rejected(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pairs = [{"prompt": f"What is {i} + {i}?", "chosen": str(2 * i), "rejected": "none"} for i in range(8)]
    steps = _run(model, tmp_path / "dpo", pairs, objective="dpo", data={"packing": "dynamic"}, duration="6 steps")
    assert steps[0].loss == pytest.approx(0.6931, abs=1e-4) and steps[0].reward == pytest.approx(0.0, abs=1e-6)
    assert steps[-1].loss < 0.69
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dpo" / "export").num_parameters() > 0


def test_pretraining(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    texts = [{"text": "the tide comes in and the boats go out " * 20}] * 8
    steps = _run(model, tmp_path / "pt", texts, objective="pretrain", duration="4 steps")
    assert len(steps) == 4 and steps[-1].loss < steps[0].loss
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "pt" / "export").num_parameters() > 0


def _compare(model: Path, folder: Path, *words: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    recipe = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "c.jsonl", "seq_len": 64, "cache_dir": "tokens"},
        "cluster": "1 cpu",
    }
    recipe |= {"batch": {"global_size": 4, "micro_size": 2}, "optim": {"lr": 1e-3, "warmup": 0.0}}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    code = cli.run(["compare", "r.yaml", "--output=both", *words])
    made = json.loads((folder / "both" / "compare.json").read_text())
    return code, made, {item["name"]: item for item in made["checks"]}


def test_compare_agrees_on_the_same_batches(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a template that has nothing after an answer's end, so that both train the same tokens."""
    monkeypatch.chdir(tmp_path)
    plain = shutil.copytree(model, tmp_path / "plain")
    for path in (plain / "tokenizer_config.json", plain / "chat_template.jinja"):
        if path.exists():
            for ending in ("<|im_end|>\\n{% endfor", "<|im_end|>\n{% endfor"):
                path.write_text(path.read_text().replace(ending, "<|im_end|>{% endfor"))
    code, made, checks = _compare(plain, tmp_path, "--steps=20")
    assert code == 0, (made["parting"], checks)
    assert [len(own) for own in made["steps"]] == [20, 20]
    names = ("packing", "tokens", "mask", "normalisation", "learning rate", "dtype", "optimizer")
    assert {name: item["state"] for name, item in checks.items()} == dict.fromkeys(names, "same")


def test_compare_names_what_llamafactory_does_otherwise(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains the newline after an answer's end, and begins its warm-up at a rate of 0."""
    monkeypatch.chdir(tmp_path)
    code, made, checks = _compare(model, tmp_path, "--steps=2", "--optim.warmup=2 steps")
    assert code == 1 and made["parting"]["step"] == 1
    assert checks["normalisation"]["state"] == "same"
    assert checks["tokens"]["state"] == "same"
    assert checks["mask"]["found"]["en"].startswith("step 1: llamafactory trains token")
    assert checks["learning rate"]["found"]["en"] == "step 1: native 0.0005, llamafactory 0"


def test_compare_names_the_count_that_divides_the_loss(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all tokens are trained, transformers counts each row's first one too, which nothing predicts: losses are in that proportion."""
    monkeypatch.chdir(tmp_path)
    code, made, checks = _compare(model, tmp_path, "--steps=1", "--objective.train_on=all")
    assert code == 1 and checks["mask"]["state"] == "same"
    found = re.fullmatch(r"step 1: llamafactory divides by (\d+), and trains (\d+) tokens", checks["normalisation"]["found"]["en"])
    assert found and int(found[1]) - int(found[2]) == 4  # rows of the step
    native, other = made["parting"]["values"]
    assert other == pytest.approx(native * int(found[2]) / int(found[1]), abs=1e-4)
